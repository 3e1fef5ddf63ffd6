"""Blocks of 32 weights of 5 bits with a float16 scale."""

from __future__ import annotations

import numpy as np

from cospec.models.weights.blocks import (
    BlockFormat,
    Blocks,
    Floats,
    half_bytes,
    halves,
    inverse,
    join_fifth_bits,
    largest_signed,
    split_fifth_bits,
)


class Q5_0(BlockFormat):
    """``scale * (integer - 16)``, integers from 0 to 31: 5.5 bits per weight."""

    name = "q5_0"
    kernel = "q5_0"
    block_size, block_bytes = 32, 22

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``; the largest weight is -16 times the scale."""
        scale = largest_signed(values) * np.float32(-1 / 16)
        integers = np.clip(np.trunc(values * inverse(scale) + 16.5), 0, 31).astype(np.uint8)
        return np.concatenate([half_bytes(scale), join_fifth_bits(integers)], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        return halves(blocks[:, :2]) * (split_fifth_bits(blocks[:, 2:]).astype(np.int8) - np.int8(16))
