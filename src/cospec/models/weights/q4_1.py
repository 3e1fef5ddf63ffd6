"""Blocks of 32 weights of 4 bits with a float16 scale and a float16 minimum."""

from __future__ import annotations

import numpy as np

from cospec.models.weights.blocks import (
    BlockFormat,
    Blocks,
    Floats,
    half_bytes,
    halves,
    join_nibbles,
    range_integers,
    split_nibbles,
)


class Q4_1(BlockFormat):
    """``scale * integer + minimum``, integers from 0 to 15: 5 bits per weight."""

    name = "q4_1"
    kernel = "q4_1"
    block_size, block_bytes = 32, 20

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``."""
        integers, scale, minimum = range_integers(values, 15)
        return np.concatenate([half_bytes(scale), half_bytes(minimum), join_nibbles(integers)], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        return halves(blocks[:, :2]) * split_nibbles(blocks[:, 4:]) + halves(blocks[:, 2:4])
