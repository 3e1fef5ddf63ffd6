"""Blocks of 32 weights of 5 bits with a float16 scale and a float16 minimum."""

from __future__ import annotations

from cospec.models.weights.blocks import Blocks, join_fifth_bits, split_fifth_bits
from cospec.models.weights.scalar_blocks import RangeFormat


class Q5_1(RangeFormat):
    """``scale * integer + minimum``, integers from 0 to 31: 6 bits per weight."""

    name = "q5_1"
    kernel = "q5_1"
    block_bytes = 24
    largest = 31

    def join(self, integers: Blocks) -> Blocks:
        """See ``ScalarFormat``."""
        return join_fifth_bits(integers)

    def split(self, packed: Blocks) -> Blocks:
        """See ``ScalarFormat``."""
        return split_fifth_bits(packed)
