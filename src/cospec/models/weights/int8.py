"""Weights of 8 bits with one scale per output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.models.weights.format import WeightFormat

LARGEST = 127
SMALLEST_SCALE = 1e-8  # of an output without weights


class Int8(WeightFormat):
    """Symmetric integers from -127 to 127, rounded to nearest even, and a float32 scale per output.

    The format is chosen by ``quantization``: the model is another model with another distribution.
    """

    name = "int8"
    devices = ("cpu",)
    kernel = "int8"

    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """See ``WeightFormat``; the parts are the integers ``[out, in]`` and the scales ``[out]``."""
        weight = weight.float()
        scale = (weight.abs().amax(1) / LARGEST).clamp_min(SMALLEST_SCALE)
        return (weight / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat``."""
        integers, scale = parts
        return integers.to(dtype) * scale[:, None].to(dtype)

    def pack(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See ``WeightFormat``."""
        return tuple(parts)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """See ``WeightFormat``."""
        return outputs * inputs + 4 * outputs
