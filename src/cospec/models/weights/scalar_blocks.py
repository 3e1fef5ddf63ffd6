"""Blocks of 32 weights with one scale: integers around a centre, integers above a minimum, or places of a table."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

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
    range_integers,
    split_nibbles,
)


class ScalarFormat(BlockFormat):
    """A format whose blocks hold 32 unsigned integers after one or two float16 numbers."""

    block_size = 32

    @abstractmethod
    def join(self, integers: Blocks) -> Blocks:
        """Return the bytes of integers ``[blocks, 32]``."""

    @abstractmethod
    def split(self, packed: Blocks) -> Blocks:
        """The reverse of ``join``."""


class CentredFormat(ScalarFormat):
    """``scale * (integer - centre)``, integers from 0 to ``2 * centre - 1``.

    Attributes:
        centre: the integer of the weight 0.
    """

    centre: ClassVar[int]

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``; the largest weight is ``-centre`` times the scale."""
        scale = largest_signed(values) * np.float32(-1 / self.centre)
        integers = np.clip(np.trunc(values * inverse(scale) + (self.centre + 0.5)), 0, 2 * self.centre - 1)
        return np.concatenate([half_bytes(scale), self.join(integers.astype(np.uint8))], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        return halves(blocks[:, :2]) * (self.split(blocks[:, 2:]).astype(np.int8) - np.int8(self.centre))


class RangeFormat(ScalarFormat):
    """``scale * integer + minimum``, integers from 0 to ``largest``.

    Attributes:
        largest: the integer of the largest weight.
    """

    largest: ClassVar[int]

    def quantize(self, values: Floats) -> Blocks:
        """See ``BlockFormat``."""
        integers, scale, minimum = range_integers(values, self.largest)
        return np.concatenate([half_bytes(scale), half_bytes(minimum), self.join(integers)], 1)

    def dequantize(self, blocks: Blocks) -> Floats:
        """See ``BlockFormat``."""
        return halves(blocks[:, :2]) * self.split(blocks[:, 4:]) + halves(blocks[:, 2:4])


class TableFormat(BlockFormat):
    """``scale * values[integer]``, integers of 4 bits.

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
