"""Combine logits in the native library, where the library can read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.native import library
from cospec.native.library import NativeBlend, Source


def native_reads(logits: Sequence[Tensor]) -> bool:
    """Return whether the native library can read the logits of all models."""
    return all(map(library.reads, logits))


def native_combine(logits: Sequence[Tensor], recipe: NativeBlend) -> Tensor:
    """Return the combined rows ``[R, V]`` in double precision, of logits that ``native_reads``."""
    return torch.from_numpy(library.blend_rows(Source(logits, recipe)))
