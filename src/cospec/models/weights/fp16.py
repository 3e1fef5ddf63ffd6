"""Weights of 16 bits in IEEE's format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.models.weights.format import WeightFormat


class Fp16(WeightFormat):
    """One float16 per weight. A CPU's products widen weights to float32, so they are those of the float32 values."""

    name = "fp16"
    block_size = 1
    dtype = torch.float16
    kernel = "fp16"

    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """See ``WeightFormat``."""
        return (weight.half(),)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat``."""
        return parts[0].to(dtype)

    def pack(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See ``WeightFormat``."""
        return tuple(parts)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """See ``WeightFormat``."""
        return 2 * outputs * inputs
