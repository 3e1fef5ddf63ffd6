"""Blocks of 256 weights of 4 bits; each 32 weights have a scale and a minimum of 6 bits."""

from __future__ import annotations

import numpy as np

from cospec.models.weights.blocks import BlockFormat, Blocks, Floats
from cospec.models.weights.super_blocks import join_pairs, quantize_parts, read_parts, split_pairs


class Q4K(BlockFormat):
    """``scale * integer - minimum``, integers from 0 to 15: 4.5 bits per weight."""

    name = "q4_k"
    kernel = "q4_k"
    block_size, block_bytes = 256, 144

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``."""
        head, integers = quantize_parts(values, 15)
        return np.concatenate([head, join_pairs(integers)], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        scales, minimums = read_parts(blocks)
        return (scales * split_pairs(blocks[:, 16:]) - minimums).reshape(len(blocks), -1)
