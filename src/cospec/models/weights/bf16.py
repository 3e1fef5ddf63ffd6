"""Weights of 16 bits with the exponents of float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.models.weights.format import WeightFormat


class Bf16(WeightFormat):
    """One bfloat16 per weight; products round their inputs to bfloat16 too, as GPUs do."""

    name = "bf16"
    block_size = 1
    dtype = torch.bfloat16
    rounds_inputs = True
    table_dtype = torch.bfloat16
    kernel = "bf16"

    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """See ``WeightFormat``."""
        return (weight.bfloat16(),)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat``."""
        return parts[0].to(dtype)

    def pack(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See ``WeightFormat``."""
        return tuple(parts)

    def round_inputs(self, x: Tensor) -> Tensor:
        """See ``WeightFormat``."""
        return x.bfloat16().to(x.dtype)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """See ``WeightFormat``."""
        return 2 * outputs * inputs
