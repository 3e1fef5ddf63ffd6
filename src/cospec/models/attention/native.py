"""Attention by the native kernel, which reads the pages in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.models.attention.backend import AttentionBackend, AttentionShape, LayerAttend
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import LayerBlocks, LayerShape
from cospec.native import operators


class NativeAttention(AttentionBackend):
    """The native kernel, on a CPU."""

    name = "native"
    by_head = False
    native_forward = True

    def prepare(self, batch: InputBatch) -> LayerAttend:
        """See ``AttentionBackend``."""

        def layer(queries: Tensor, keys: Tensor, values: Tensor, pages: LayerBlocks, heads: AttentionShape) -> Tensor:
            return operators.attention(
                queries, keys, values, pages.keys, pages.values, batch, heads.scale, heads.window, heads.softcap
            )

        return layer

    def why_not(self, device: torch.device, shapes: Sequence[LayerShape], page_size: int) -> str:
        """See ``AttentionBackend``."""
        if device.type != "cpu":
            return f"native kernels do not run on {device.type}"
        if operators.why_not():
            return operators.why_not()
        if page_size % 8 or any(shape.dim % 8 or shape.dim > operators.MAX_DIM for shape in shapes):
            return f"native attention needs heads and pages of multiples of 8, heads of at most {operators.MAX_DIM}"
        return ""
