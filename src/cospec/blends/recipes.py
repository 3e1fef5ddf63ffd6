"""Blends as the native library computes them, where it can read the logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from cospec import native
from cospec.native import Recipe, Source


def blended(logits: Seq[Tensor], recipe: Recipe) -> Tensor | None:
    """The joint rows ``[R, V]`` in double precision; None where torch has to compute them."""
    if not all(native.reads(rows) for rows in logits):
        return None
    return torch.from_numpy(native.blend_rows(Source(logits, recipe)))
