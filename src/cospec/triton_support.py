"""Whether Triton's kernels can run on a device."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # modules below the models ask, and load no torch
    import torch

LEAST_CAPABILITY = (8, 0)  # of a GPU; earlier ones multiply no bfloat16
COMPILERS = ("cc", "gcc", "clang")  # Triton compiles its launchers in C


def why_not(device: torch.device) -> str:
    """Return why no kernel can run on a device, as a clause; empty if kernels can run."""
    if find_spec("triton") is None:
        return "Triton is not installed (the extra `triton`)"
    if device.type == "cpu":
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        return "" if interprets else "Triton runs on a CPU only with TRITON_INTERPRET=1, in the interpreter"
    if device.type != "cuda":
        return f"Triton kernels do not run on {device.type}"
    return _why_no_gpu(device)


def _why_no_gpu(device: torch.device) -> str:
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
        return f"the GPU has compute capability {found}, and the kernels need {least}"
    if os.environ.get("CC") is None and not any(map(shutil.which, COMPILERS)):
        return "Triton finds no C compiler"
    return ""
