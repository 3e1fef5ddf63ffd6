"""Blocks of 256 weights of 5 bits; each 32 weights have a scale and a minimum of 6 bits."""

from __future__ import annotations

import numpy as np

from cospec.models.weights.blocks import BlockFormat, Blocks, Floats
from cospec.models.weights.super_blocks import PARTS, join_pairs, quantize_parts, read_parts, split_pairs


class Q5K(BlockFormat):
    """``scale * integer - minimum``, integers from 0 to 31: 5.5 bits per weight."""

    name = "q5_k"
    kernel = "q5_k"
    block_size, block_bytes = 256, 176

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``; bit ``i`` of a byte of fifth bits belongs to part ``i``."""
        head, integers = quantize_parts(values, 31)
        fifth = np.packbits(integers >> np.uint8(4), axis=1, bitorder="little")[:, 0]
        return np.concatenate([head, fifth, join_pairs(integers & np.uint8(15))], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        scales, minimums = read_parts(blocks)
        fifth = blocks[:, None, 16:48] >> np.arange(PARTS, dtype=np.uint8)[:, None] & np.uint8(1)
        integers = split_pairs(blocks[:, 48:]) | fifth << np.uint8(4)
        return (scales * integers - minimums).reshape(len(blocks), -1)
