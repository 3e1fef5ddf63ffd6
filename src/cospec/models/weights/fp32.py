"""Weights of 32 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.models.weights.format import WeightFormat


class Fp32(WeightFormat):
    """One float32 per weight."""

    name = "fp32"
    block_size = 1
    dtype = torch.float32

    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """See ``WeightFormat``."""
        return (weight.float(),)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat``."""
        return parts[0].to(dtype)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """See ``WeightFormat``."""
        return 4 * outputs * inputs
