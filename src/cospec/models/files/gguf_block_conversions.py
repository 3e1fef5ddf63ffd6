"""Blocks of GGUF types that have no kernel, as blocks of types that have one; no weight becomes a float.

The layouts are those of ``gguf.quants``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cospec.errors import InvalidInput, words
from cospec.models.weights.blocks import Blocks, half_bytes, halves
from cospec.models.weights.q6_k import SHIFTS, join

LARGEST_HALF = 65504
_AT_ONCE = 1 << 14  # blocks; bounds the memory of a conversion
_FOUR = np.uint8(4)


@dataclass(frozen=True, slots=True)
class BlockConversion:
    """How blocks of a type become blocks of a format.

    Attributes:
        format: the name of the weight format.
        block_bytes: bytes of a block in the file.
        convert: blocks ``[n, block_bytes]`` to the format's blocks ``[n, bytes]`` of the same weights.
    """

    format: str
    block_bytes: int
    convert: Callable[[Blocks], Blocks]

    def rows(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Convert the blocks of rows ``[..., bytes of a row]``.

        Raises:
            InvalidInput: a scale is too large for the format.
        """
        blocks = rows.reshape(-1, self.block_bytes)
        parts = [self.convert(blocks[start : start + _AT_ONCE]) for start in range(0, len(blocks), _AT_ONCE)]
        return np.concatenate(parts).reshape(*rows.shape[:-1], -1)


def q3_k_to_q6_k(blocks: Blocks) -> Blocks:
    """Return blocks of the same values: ``scale * (sub-scale - 32) * integer``, integers from -4 to 3.

    Both types have a float16 scale, and a sub-scale for 16 weights. ``q6_k`` stores integers plus 32.
    """
    eighths = np.arange(8, dtype=np.uint8).reshape(1, 2, 4, 1)
    third = blocks[:, None, None, :32] >> eighths & np.uint8(1)  # 0 subtracts 4
    low = blocks[:, 32:96].reshape(-1, 2, 1, 32) >> SHIFTS & np.uint8(3)
    sub_scales = np.concatenate([blocks[:, 96:104] & np.uint8(15), blocks[:, 96:104] >> _FOUR], 1)
    high = (blocks[:, None, 104:108] >> SHIFTS & np.uint8(3)).reshape(-1, 16)
    sub_scales |= high << _FOUR
    return join(low + (third << np.uint8(2)) + np.uint8(28), sub_scales.view(np.int8) - np.int8(32), blocks[:, 108:])


def iq4_xs_to_iq4_nl(blocks: Blocks) -> Blocks:
    """Return blocks of the same places in the table, and ``scale * (sub-scale - 32)`` rounded to float16.

    All products are multiples of float16's smallest number, 2^-24, so those below 2^-13 stay exact. Rounding changes a
    larger product by up to the fraction 2^-11 of it.
    """
    low = np.stack([blocks[:, 4:8] & np.uint8(15), blocks[:, 4:8] >> _FOUR], 2).reshape(-1, 8)
    high = (blocks[:, 2:4, None] >> SHIFTS[:, 0] & np.uint8(3)).reshape(-1, 8)
    scales = halves(blocks[:, :2]) * ((low | high << _FOUR).astype(np.int8) - np.int8(32))
    if (largest := np.abs(scales).max()) > LARGEST_HALF:
        raise InvalidInput("scale of iq4_xs", words(f"{largest:g}"), f"up to {LARGEST_HALF}, the largest float16")
    packed = blocks[:, 8:].reshape(-1, 16)
    return np.concatenate([half_bytes(scales.reshape(-1, 1)), packed], 1).reshape(len(blocks), -1)


CONVERSIONS = {
    "q3_k": BlockConversion("q6_k", 110, q3_k_to_q6_k),
    "iq4_xs": BlockConversion("iq4_nl", 136, iq4_xs_to_iq4_nl),
}
"""By types of GGUF files."""
