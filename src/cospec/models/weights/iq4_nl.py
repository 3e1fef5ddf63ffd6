"""Blocks of 32 weights of 4 bits, places of a table that is denser near zero, with a float16 scale."""

from __future__ import annotations

import numpy as np

from cospec.models.weights.blocks import Blocks, Floats, half_bytes, halves, largest_signed
from cospec.models.weights.scalar_blocks import TableFormat


class Iq4Nl(TableFormat):
    """``scale * values[integer]``: 4.5 bits per weight."""

    name = "iq4_nl"
    kernel = "iq4_nl"
    block_bytes, scale_bytes = 18, 2
    values = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)

    def scales_of(self, values: Floats) -> Blocks:
        """See ``TableFormat``; the largest weight is -127 times the scale."""
        return half_bytes(largest_signed(values) * np.float32(-1 / 127))

    def read_scales(self, packed: Blocks) -> Floats:
        """See ``TableFormat``."""
        return halves(packed)
