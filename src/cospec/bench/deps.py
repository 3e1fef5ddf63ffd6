"""The packages that only benchmarks need."""

from __future__ import annotations

from importlib.util import find_spec

from cospec.errors import CospecError

NEEDED = ("matplotlib", "scipy")


def require() -> None:
    """Check the packages before the measurement.

    Raises:
        CospecError: a package is missing. The error names the install command.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise CospecError(f"Benchmarks need {' and '.join(missing)}; install them with pip install 'cospec[bench]'.")
