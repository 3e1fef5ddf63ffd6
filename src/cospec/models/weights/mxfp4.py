"""Blocks of 32 weights of 4-bit floating point with a power of two as scale (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import numpy as np

from cospec.models.weights.blocks import Blocks, Floats
from cospec.models.weights.scalar_blocks import TableFormat


class Mxfp4(TableFormat):
    """``2^(exponent - 127)`` times a number with 2 bits of exponent and 1 of mantissa: 4.25 bits per weight."""

    name = "mxfp4"
    kernel = "mxfp4"
    block_bytes, scale_bytes = 17, 1
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)

    def scales_of(self, values: Floats) -> Blocks:
        """See ``TableFormat``; the largest power of two of the table, 4, meets that of the largest weight."""
        largest = np.abs(values).max(1, keepdims=True)
        exponent = np.frexp(largest)[1] - 1 - 2 + 127
        return np.where(largest > 0, np.clip(exponent, 0, 254), 0).astype(np.uint8)

    def read_scales(self, packed: Blocks) -> Floats:
        """See ``TableFormat``."""
        return np.ldexp(np.float32(1), packed.astype(np.int32) - 127)
