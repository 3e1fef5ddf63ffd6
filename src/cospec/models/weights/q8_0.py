"""Blocks of 32 weights of 8 bits with a float16 scale."""

from __future__ import annotations

import numpy as np

from cospec.models.weights.blocks import BlockFormat, Blocks, Floats, half_bytes, halves, inverse


class Q8_0(BlockFormat):
    """``scale * integer``, integers from -127 to 127: 8.5 bits per weight."""

    name = "q8_0"
    kernel = "q8_0"
    block_size, block_bytes = 32, 34

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``."""
        scale = np.abs(values).max(1, keepdims=True) / 127
        integers = np.rint(values * inverse(scale)).astype(np.int8)
        return np.concatenate([half_bytes(scale), integers.view(np.uint8)], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        return halves(blocks[:, :2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
