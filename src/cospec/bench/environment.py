"""The machine and the versions of a measurement; every result includes the environment."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from cospec.native.library import available, isa
from cospec.system import processor, usable_processors

PACKAGES = ("cospec", "torch", "transformers")


def describe() -> dict[str, str | int]:
    """Describe processor, usable cores, operating system, versions, native kernels, and a GPU if torch has one."""
    found: dict[str, str | int] = {
        "processor": processor(),
        "cores": usable_processors(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    gpu = _gpu()
    return found | {"kernels": isa() if available() else "none"} | ({"gpu": gpu} if gpu else {})


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
