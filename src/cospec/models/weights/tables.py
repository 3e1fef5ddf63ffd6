"""Blocks of 32 weights of 4 bits that are places of a table."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from cospec.models.weights.blocks import BlockFormat, Blocks, Floats, inverse, join_nibbles, split_nibbles


class TableFormat(BlockFormat):
    """``scale * values[integer]``.

    Attributes:
        values: ``[16]`` of the table.
        scale_bytes: bytes of the scale, at the start of a block.
    """

    block_size = 32
    values: ClassVar[Floats]
    scale_bytes: ClassVar[int]

    @abstractmethod
    def scales_of(self, values: Floats) -> Blocks:
        """Return the bytes ``[blocks, scale_bytes]`` of the scales for values ``[blocks, 32]``."""

    @abstractmethod
    def read_scales(self, packed: Blocks) -> Floats:
        """Return the scales ``[blocks, 1]`` of their bytes."""

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``; each weight takes the nearest value of the table."""
        scales = self.scales_of(values)
        scaled = values * inverse(self.read_scales(scales))
        order = np.argsort(self.values, kind="stable")
        middles = (self.values[order][1:] + self.values[order][:-1]) / 2
        nearest = order[np.searchsorted(middles, scaled)].astype(np.uint8)
        return np.concatenate([scales, join_nibbles(nearest)], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        found: Floats = self.values[split_nibbles(blocks[:, self.scale_bytes :])]
        return self.read_scales(blocks[:, : self.scale_bytes]) * found
