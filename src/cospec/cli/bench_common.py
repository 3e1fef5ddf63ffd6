"""Shared parts of the benchmarks: the tokenizer that counts, the progress bar, the output of results, the packages."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cospec.errors import CospecError, InvalidInput

NEEDED = ("matplotlib", "scipy")


def require() -> None:
    """Check the packages before the measurement.

    Raises:
        CospecError: a package is missing. The error names the install command.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise CospecError(f"Benchmarks need {' and '.join(missing)}; install them with pip install 'cospec[bench]'.")


def tokenizer_of(served: str | None) -> Any | None:
    """Return the served model's tokenizer if this machine has it; None to trust the server's counts."""
    try:
        return load_tokenizer(served or "none", download=False)
    except CospecError:
        return None


def load_tokenizer(name: str, download: bool = True) -> Any | None:
    """Load a tokenizer for counting; None for the name ``none``.

    Raises:
        InvalidInput: no tokenizer of that name exists.
    """
    if name == "none":
        return None
    from transformers import AutoTokenizer

    from cospec.models.loading import resolve

    local = name.partition(":")[0] == "zoo" or Path(name).is_dir()
    try:
        return AutoTokenizer.from_pretrained(resolve(name) if local else name, local_files_only=not download)
    except (OSError, ValueError):
        raise InvalidInput("tokenizer", name, "zoo, a folder or a hub name with a tokenizer, or none") from None


def command(arguments: list[str]) -> str:
    """Return the command line in repeatable form, without API keys."""
    hidden = [
        "..." if before == "--api-key" else "--api-key=..." if own.startswith("--api-key=") else own
        for before, own in zip(["", *arguments], arguments, strict=False)
    ]
    return shlex.join(["cospec", *(re.sub(r'("api_key":\s*)"[^"]*"', r'\1"..."', word) for word in hidden)])


def finish(kind: str, settings: Mapping[str, Any], measured: Mapping[str, Any], to: Path | None) -> None:
    """Show the result, and save the result if ``to`` is a path."""
    from rich.console import Console

    from cospec.bench import report

    result = complete(kind, settings, measured)
    report.show(result, Console())
    write(result, to)


def complete(kind: str, settings: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the result with this command line; see ``report.complete``."""
    from cospec.bench import report

    return report.complete(kind, command(sys.argv[1:]), settings, measured)


def write(result: Mapping[str, Any], to: Path | None) -> None:
    """Write the result as JSON and as an HTML page; do nothing if ``to`` is None."""
    from cospec.bench import report

    if to is not None:
        for path in (to, to.with_suffix(".html")):
            report.save(result, path)
        print(f"Written to {to} and {to.with_suffix('.html')}.")


class ProgressBar:
    """A progress bar on stderr, with a count of failures if requests fail."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("starting", total=total)
        self._label, self._failures = "running", 0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def describe(self, label: str) -> None:
        """Show the current stage."""
        self._label = label
        self._show()

    def ran(self, label: str) -> None:
        """Count one finished run of ``label``."""
        self.describe(label)
        self.advance()

    def advance(self, failed: bool = False) -> None:
        """Count one finished request."""
        self._failures += failed
        self._progress.advance(self._task)
        self._show()

    def _show(self) -> None:
        failures = f", {self._failures} failed" if self._failures else ""
        self._progress.update(self._task, description=self._label + failures)
