"""Weights of 16 bits in IEEE's format, which GPUs multiply."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.models.weights.format import WeightFormat


class Fp16(WeightFormat):
    """One float16 per weight. A CPU computes float16 weights as float32, see ``choose_format``."""

    name = "fp16"
    dtype = torch.float16
    devices = ("cuda",)
    table_dtype = torch.float16

    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """See ``WeightFormat``."""
        return (weight.half(),)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat``."""
        return parts[0].to(dtype)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """See ``WeightFormat``."""
        return 2 * outputs * inputs
