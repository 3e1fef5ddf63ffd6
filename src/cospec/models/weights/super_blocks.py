"""Blocks of 256 weights whose parts have integer scales: the K formats of GGUF.

``scale`` and ``minimum`` of a block are float16; each part of 32 weights multiplies them by integers of 6 bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cospec.models.weights.blocks import Blocks, Floats, half_bytes, halves, inverse

PARTS, PART = 8, 32
LARGEST_SUB_SCALE = 63
_SIX, _FOUR, _TWO = np.uint8(63), np.uint8(15), np.uint8(6)


def split_sub_scales(packed: Blocks) -> tuple[Blocks, Blocks]:
    """Return the scales and minimums ``[n, 8]`` of 12 bytes ``[n, 12]``, 6 bits each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & _SIX, third & _FOUR | first >> _TWO << np.uint8(4)], 1)
    minimums = np.concatenate([second & _SIX, third >> np.uint8(4) | second >> _TWO << np.uint8(4)], 1)
    return scales, minimums


def join_sub_scales(scales: Blocks, minimums: Blocks) -> Blocks:
    """The reverse of ``split_sub_scales``."""
    four = np.uint8(4)
    first, second = (x[:, :4] | x[:, 4:] >> four << _TWO for x in (scales, minimums))
    return np.concatenate([first, second, scales[:, 4:] & _FOUR | (minimums[:, 4:] & _FOUR) << four], 1)


def read_parts(blocks: Blocks) -> tuple[Floats, Floats]:
    """Return scales and minimums ``[n, 8, 1]`` of the parts; a block starts with 16 bytes of both."""
    scales, minimums = split_sub_scales(blocks[:, 4:16])
    return (halves(blocks[:, :2]) * scales)[..., None], (halves(blocks[:, 2:4]) * minimums)[..., None]


def quantize_parts(values: Floats, largest: int) -> tuple[Blocks, Blocks]:
    """Round ``[n, 256]`` values to integers from 0 to ``largest``; the range of a part contains 0.

    Returns:
        The first 16 bytes of each block, and the integers ``[n, 8, 32]``.
    """
    parts = values.reshape(-1, PARTS, PART)
    minimum = np.maximum(-parts.min(2), 0)
    scale = (np.maximum(parts.max(2), 0) + minimum) / np.float32(largest)
    head = [_sub_integers(each) for each in (scale, minimum)]
    packed = np.concatenate([head[0][0], head[1][0], join_sub_scales(head[0][1], head[1][1])], 1)
    scales, minimums = read_parts(packed)
    integers = np.clip(np.rint((parts + minimums) * inverse(scales)), 0, largest).astype(np.uint8)
    return packed, integers


def _sub_integers(each: NDArray[np.float32]) -> tuple[Blocks, Blocks]:
    """Return the float16 bytes ``[n, 2]`` of a common factor, and the integers ``[n, 8]``."""
    factor = half_bytes(each.max(1, keepdims=True) / np.float32(LARGEST_SUB_SCALE))
    integers = np.clip(np.rint(each * inverse(halves(factor))), 0, LARGEST_SUB_SCALE)
    return factor, integers.astype(np.uint8)


def split_pairs(packed: Blocks) -> Blocks:
    """Return ``[n, 8, 32]`` of 128 bytes: 32 bytes hold a part in lower halves and the next part in upper halves."""
    lines = packed.reshape(-1, PARTS // 2, 1, PART)
    return np.concatenate([lines & _FOUR, lines >> np.uint8(4)], 2).reshape(-1, PARTS, PART)


def join_pairs(integers: Blocks) -> Blocks:
    """The reverse of ``split_pairs``, of integers below 16."""
    pairs = integers.reshape(-1, PARTS // 2, 2, PART)
    return (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(-1, PARTS * PART // 2)
