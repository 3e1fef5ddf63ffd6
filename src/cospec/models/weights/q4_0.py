"""Blocks of 32 weights of 4 bits with a float16 scale."""

from __future__ import annotations

from cospec.models.weights.blocks import Blocks, join_nibbles, split_nibbles
from cospec.models.weights.scalar_blocks import CentredFormat


class Q4_0(CentredFormat):
    """``scale * (integer - 8)``, integers from 0 to 15: 4.5 bits per weight."""

    name = "q4_0"
    kernel = "q4_0"
    block_bytes = 18
    centre = 8

    def join(self, integers: Blocks) -> Blocks:
        """See ``ScalarFormat``."""
        return join_nibbles(integers)

    def split(self, packed: Blocks) -> Blocks:
        """See ``ScalarFormat``."""
        return split_nibbles(packed)
