"""Blocks of 32 weights of 4 bits with a float16 scale."""

from __future__ import annotations

import numpy as np

from cospec.models.weights.blocks import (
    BlockFormat,
    Blocks,
    Floats,
    half_bytes,
    halves,
    inverse,
    join_nibbles,
    largest_signed,
    split_nibbles,
)


class Q4_0(BlockFormat):
    """``scale * (integer - 8)``, integers from 0 to 15: 4.5 bits per weight."""

    name = "q4_0"
    kernel = "q4_0"
    block_size, block_bytes = 32, 18

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``; the largest weight is -8 times the scale."""
        scale = largest_signed(values) * np.float32(-1 / 8)
        integers = np.clip(np.trunc(values * inverse(scale) + 8.5), 0, 15).astype(np.uint8)
        return np.concatenate([half_bytes(scale), join_nibbles(integers)], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        return halves(blocks[:, :2]) * (split_nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8))
