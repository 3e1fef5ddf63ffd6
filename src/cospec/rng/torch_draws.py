"""The draws of ``rng.random_streams`` in tensor operations: Philox4x64 in wrapping 64-bit integers, with equal words.

Signed integers hold the bits of unsigned words, because tensors have no full unsigned arithmetic.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cospec import triton_support

ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
WORDS = 4  # of a block
TO_UNIT = 2.0**-52
HALF_STEP = 2.0**-53

_HALF = 0xFFFFFFFF


def signed(word: int) -> int:
    """Return the signed integer with the bits of an unsigned word."""
    word %= 2**64
    return word - 2**64 if word >= 2**63 else word


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four words of the block at ``counter``; all tensors are int64 and broadcast."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(ROUNDS):
        (h0, l0), (h1, l1) = _multiply(MULTIPLIERS[0], c0), _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + signed(KEY_STEPS[0]), k1 + signed(KEY_STEPS[1])
    return c0, c1, c2, c3


def _multiply(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of each product, from products of half words."""
    high, low = factor >> 32, factor & _HALF
    word_high, word_low = _shift(words, 32), words & _HALF
    cross, other = word_high * low, word_low * high
    carry = _shift(word_low * low, 32) + (cross & _HALF) + (other & _HALF)
    return word_high * high + _shift(cross, 32) + _shift(other, 32) + _shift(carry, 32), words * signed(factor)


def _shift(words: Tensor, bits: int) -> Tensor:
    """Shift right without a sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _unit(words: Tensor) -> Tensor:
    """Return numbers strictly between 0 and 1, see ``rng.to_unit_interval``."""
    return _shift(words, 12).double() * TO_UNIT + HALF_STEP


def exponential_sample(weights: Tensor, seeds: Tensor, kinds: Tensor, positions: Tensor, bases: Tensor) -> Tensor:
    """Return the winner of each row's exponential race, -1 where no weight is positive, as ``rng.exponential_sample``.

    Args:
        weights: ``[R, V]``, float64.
        seeds, kinds, positions, bases: ``[R]``, of each row's stream; the base of a target stream is 0.
    """
    if weights.is_cuda and races_by_triton(weights.device):
        from cospec.rng.triton_draws import triton_race  # other devices need no Triton

        return triton_race(weights, seeds, kinds, positions, bases)
    vocab_size = weights.shape[-1]
    blocks = torch.arange(1, -(-vocab_size // WORDS) + 1, device=weights.device)[None]
    zero = torch.zeros_like(blocks)
    key = seeds[:, None], kinds[:, None]
    words = torch.stack(philox(key, (blocks, zero, positions[:, None] + zero, bases[:, None] + zero)), -1)
    exponentials = -torch.log(_unit(words.flatten(1)[:, :vocab_size]))
    return torch.where(weights.amax(-1) > 0, first_largest(weights / exponentials), -1)


@cache
def races_by_triton(device: torch.device) -> bool:
    """Return whether Triton draws on a device."""
    return not triton_support.why_not(device)


def first_largest(rows: Tensor) -> Tensor:
    """Return the first index of the largest value of each row, which ``argmax`` does not promise on every device."""
    places = torch.arange(rows.shape[-1], device=rows.device)
    return torch.where(rows == rows.amax(-1, keepdim=True), places, rows.shape[-1]).amin(-1)
