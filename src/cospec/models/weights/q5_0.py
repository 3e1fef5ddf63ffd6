"""Blocks of 32 weights of 5 bits with a float16 scale."""

from __future__ import annotations

from cospec.models.weights.blocks import Blocks, join_fifth_bits, split_fifth_bits
from cospec.models.weights.scalar_blocks import CentredFormat


class Q5_0(CentredFormat):
    """``scale * (integer - 16)``, integers from 0 to 31: 5.5 bits per weight."""

    name = "q5_0"
    kernel = "q5_0"
    block_bytes = 22
    centre = 16

    def join(self, integers: Blocks) -> Blocks:
        """See ``ScalarFormat``."""
        return join_fifth_bits(integers)

    def split(self, packed: Blocks) -> Blocks:
        """See ``ScalarFormat``."""
        return split_fifth_bits(packed)
