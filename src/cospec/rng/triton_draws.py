"""``torch_draws.exponential_sample`` as two Triton kernels, where torch needs hundreds of launches.

A program computes one *part* of a row, whose length is fixed. So a row's result does not depend on other rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cospec.rng import torch_draws

PART = tl.constexpr(1024)  # weights of a program
WORDS = tl.constexpr(torch_draws.WORDS)
ROUNDS = tl.constexpr(torch_draws.ROUNDS)
FIRST_FACTOR, SECOND_FACTOR = (tl.constexpr(word) for word in torch_draws.MULTIPLIERS)
FIRST_STEP, SECOND_STEP = (tl.constexpr(word) for word in torch_draws.KEY_STEPS)
TO_UNIT = tl.constexpr(torch_draws.TO_UNIT)
HALF_STEP = tl.constexpr(torch_draws.HALF_STEP)
LAST = tl.constexpr(2**63 - 1)  # no place is larger
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}  # every rounding is as written

# What the weights of a part contain; the largest number of a row's parts holds for the row.
NOTHING = tl.constexpr(0)  # no positive weight
POSITIVE = tl.constexpr(1)
NOT_A_NUMBER = tl.constexpr(2)


def triton_race(weights: Tensor, seeds: Tensor, kinds: Tensor, positions: Tensor, bases: Tensor) -> Tensor:
    """See ``torch_draws.exponential_sample``."""
    rows, size = weights.shape
    parts = -(-size // PART.value)
    streams = torch.stack([seeds, kinds, positions, bases])
    scores = torch.empty(rows, parts, dtype=torch.float64, device=weights.device)
    # each in memory of its own, whose address is aligned for any number of rows: Triton compiles once
    places, contents, winners = (
        torch.empty(size, dtype=torch.int64, device=weights.device) for size in ((rows, parts), (rows, parts), (rows,))
    )
    if rows:
        found = scores, places, contents
        race_kernel[(rows, parts)](weights.contiguous(), streams, *found, size, **OPTIONS)
        merge_kernel[(rows,)](*found, winners, parts, WIDTH=triton.next_power_of_2(parts), **OPTIONS)
    return winners


@triton.jit
def _philox(k0, k1, c0, c1, c2, c3):
    """Return the four words of each block, see ``torch_draws.philox``; all words are uint64."""
    for _ in tl.static_range(ROUNDS):
        h0, l0 = tl.umulhi(c0, FIRST_FACTOR), c0 * FIRST_FACTOR
        h1, l1 = tl.umulhi(c2, SECOND_FACTOR), c2 * SECOND_FACTOR
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + FIRST_STEP, k1 + SECOND_STEP
    return c0, c1, c2, c3


@triton.jit
def _first_largest(scores, places):
    """Return the largest score, and the smallest of its places."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, places, LAST), 0)


@triton.jit
def race_kernel(weights, streams, scores, places, contents, size):
    """Write the best score of one part of a row, its place, and what the part contains; grid ``(R, parts)``.

    Args:
        weights: float64 ``[R, size]``.
        streams: int64 ``[4, R]``, seeds, kinds, positions and bases.
        scores: float64 ``[R, parts]``.
        places, contents: int64 ``[R, parts]``.
    """
    row, part, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    blocks: tl.constexpr = PART // WORDS
    seed = tl.load(streams + row).to(tl.uint64)
    kind = tl.load(streams + rows + row).to(tl.uint64)
    block = (part * blocks + 1 + tl.arange(0, blocks)).to(tl.uint64)
    zero = tl.zeros([blocks], tl.uint64)
    position = zero + tl.load(streams + 2 * rows + row).to(tl.uint64)
    base = zero + tl.load(streams + 3 * rows + row).to(tl.uint64)
    w0, w1, w2, w3 = _philox(seed, kind, block, zero, position, base)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniforms = (words >> 12).to(tl.float64) * TO_UNIT + HALF_STEP

    at = part * PART + tl.arange(0, PART)
    own = tl.load(weights + row * size + at, mask=at < size, other=float("-inf"))
    best, place = _first_largest(own / -tl.log(uniforms), at.to(tl.int64))
    found = tl.where(own != own, NOT_A_NUMBER, tl.where(own > 0, POSITIVE, NOTHING))
    to = row * tl.num_programs(1) + part
    tl.store(scores + to, best)
    tl.store(places + to, place)
    tl.store(contents + to, tl.max(found, 0).to(tl.int64))


@triton.jit
def merge_kernel(scores, places, contents, winners, parts, WIDTH: tl.constexpr):
    """Write the winner of a row's parts; grid ``(R,)``.

    A row with a weight that is not a number has no winner, as in ``torch_draws.exponential_sample``.

    Args:
        scores, places, contents: of ``race_kernel``.
        winners: int64 ``[R]``.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = part < parts
    own_scores = tl.load(scores + row * parts + part, mask=inside, other=float("-inf"))
    own_places = tl.load(places + row * parts + part, mask=inside, other=LAST)
    found = tl.max(tl.load(contents + row * parts + part, mask=inside, other=NOTHING), 0)
    _, place = _first_largest(own_scores, own_places)
    tl.store(winners + row, tl.where(found == POSITIVE, place, -1))
