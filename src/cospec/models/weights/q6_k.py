"""Blocks of 256 weights of 6 bits; each 16 weights have a scale of 8 bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cospec.models.weights.blocks import BlockFormat, Blocks, Floats, half_bytes, halves, inverse, largest_signed

SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]  # of the high bits of each quarter


class Q6K(BlockFormat):
    """``scale * (integer - 32)``, integers from 0 to 63: 6.5625 bits per weight.

    Weights lie in two halves of four quarters of 32. A byte of low bits holds quarters 0 and 2, or 1 and 3; a byte of
    high bits holds all four.
    """

    name = "q6_k"
    kernel = "q6_k"
    block_size, block_bytes = 256, 210

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``; the largest weight of a part is -32 times the scale."""
        parts = values.reshape(-1, 16)
        scale = (largest_signed(parts) * np.float32(-1 / 32)).reshape(-1, 16)
        factor = half_bytes(largest_signed(scale) * np.float32(-1 / 128))
        sub_scales = np.clip(np.rint(scale * inverse(halves(factor))), -128, 127).astype(np.int8)
        step = (halves(factor) * sub_scales)[..., None]
        integers = np.clip(np.rint(values.reshape(-1, 16, 16) * inverse(step)), -32, 31).astype(np.int8) + np.int8(32)
        return join(integers.astype(np.uint8), sub_scales, factor)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        n = len(blocks)
        packed_low, packed_high = blocks[:, :128].reshape(n, 2, 2, 32), blocks[:, 128:192].reshape(n, 2, 1, 32)
        low = np.concatenate([packed_low & np.uint8(15), packed_low >> np.uint8(4)], 2)
        high = packed_high >> SHIFTS & np.uint8(3)
        integers = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
        sub_scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
        step = (halves(blocks[:, 208:]) * sub_scales)[..., None]
        values: Floats = (step * integers.reshape(n, 16, 16)).reshape(n, -1)
        return values


def join(integers: Blocks, sub_scales: NDArray[np.int8], scales: Blocks) -> Blocks:
    """Return blocks.

    Args:
        integers: of 6 bits; 256 for each block.
        sub_scales: ``[n, 16]``.
        scales: two bytes of float16 ``[n, 2]``.
    """
    n, quarters = len(scales), integers.reshape(-1, 2, 4, 32)
    low = quarters & np.uint8(15)
    packed_low = low[:, :, :2] | low[:, :, 2:] << np.uint8(4)
    high = np.bitwise_or.reduce(quarters >> np.uint8(4) << SHIFTS, 2)
    return np.concatenate([packed_low.reshape(n, -1), high.reshape(n, -1), sub_scales.view(np.uint8), scales], 1)
