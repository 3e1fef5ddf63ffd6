"""Blocks of 32 weights with one scale: integers around a centre, or integers above a minimum."""

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
    largest_signed,
    range_integers,
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
