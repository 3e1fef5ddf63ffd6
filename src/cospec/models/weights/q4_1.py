"""Blocks of 32 weights of 4 bits with a float16 scale and a float16 minimum."""

from __future__ import annotations

from cospec.models.weights.blocks import Blocks, join_nibbles, split_nibbles
from cospec.models.weights.scalar_blocks import RangeFormat


class Q4_1(RangeFormat):
    """``scale * integer + minimum``, integers from 0 to 15: 5 bits per weight."""

    name = "q4_1"
    kernel = "q4_1"
    block_bytes = 20
    largest = 15

    def join(self, integers: Blocks) -> Blocks:
        """See ``ScalarFormat``."""
        return join_nibbles(integers)

    def split(self, packed: Blocks) -> Blocks:
        """See ``ScalarFormat``."""
        return split_nibbles(packed)
