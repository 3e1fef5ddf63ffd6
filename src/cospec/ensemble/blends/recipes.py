"""Blends as the native library computes them, where it can read the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.native import library
from cospec.native.library import NativeBlend, Source


def blended(logits: Sequence[Tensor], recipe: NativeBlend) -> Tensor | None:
    """The joint rows ``[R, V]`` in double precision; None where torch has to compute them."""
    if not all(library.reads(rows) for rows in logits):
        return None
    return torch.from_numpy(library.blend_rows(Source(logits, recipe)))
