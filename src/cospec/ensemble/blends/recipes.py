"""Combine logits in the native library, where the library can read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.native import library
from cospec.native.library import NativeBlend, Source


def native_combine(logits: Sequence[Tensor], recipe: NativeBlend) -> Tensor | None:
    """Return the combined rows ``[R, V]`` in double precision; None if the native library cannot read the logits."""
    if not all(library.reads(rows) for rows in logits):
        return None
    return torch.from_numpy(library.blend_rows(Source(logits, recipe)))
