"""Packed masks of allowed tokens: bit ``i % 32`` of word ``i // 32`` is set where token ``i`` is allowed."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

Bitmask = NDArray[np.uint32]

_WORD_BITS = 32
_ALL = 0xFFFFFFFF


def num_words(vocab_size: int) -> int:
    """Return the words of a mask of ``vocab_size`` tokens."""
    return -(-vocab_size // _WORD_BITS)


def allow_all(vocab_size: int, *shape: int) -> Bitmask:
    """Return ``[*shape, num_words]`` with every bit set."""
    return np.full((*shape, num_words(vocab_size)), _ALL, dtype=np.uint32)


def allow(tokens: Collection[int], vocab_size: int) -> Bitmask:
    """Return ``[num_words]``, the mask that allows ``tokens`` alone."""
    bits = np.zeros(num_words(vocab_size) * _WORD_BITS, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def ban(tokens: Collection[int], vocab_size: int) -> Bitmask:
    """Return ``[num_words]``, the mask that allows all but ``tokens``."""
    return ~allow(tokens, vocab_size)


def unpack(masks: Bitmask, vocab_size: int) -> NDArray[np.bool_]:
    """Return ``[..., vocab_size]``, whether each token is allowed."""
    bits = np.unpackbits(np.ascontiguousarray(masks).view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)
