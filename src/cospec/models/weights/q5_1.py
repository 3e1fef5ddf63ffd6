"""Blocks of 32 weights of 5 bits with a float16 scale and a float16 minimum."""

from __future__ import annotations

import numpy as np

from cospec.models.weights.blocks import (
    BlockFormat,
    Blocks,
    Floats,
    half_bytes,
    halves,
    join_fifth_bits,
    range_integers,
    split_fifth_bits,
)


class Q5_1(BlockFormat):
    """``scale * integer + minimum``, integers from 0 to 31: 6 bits per weight."""

    name = "q5_1"
    kernel = "q5_1"
    block_size, block_bytes = 32, 24

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``."""
        integers, scale, minimum = range_integers(values, 31)
        return np.concatenate([half_bytes(scale), half_bytes(minimum), join_fifth_bits(integers)], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        return halves(blocks[:, :2]) * split_fifth_bits(blocks[:, 4:]) + halves(blocks[:, 2:4])
