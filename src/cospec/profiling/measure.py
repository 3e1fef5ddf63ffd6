"""Timing forwards and drafts over a grid of (context, batched tokens, sequences), within a given time.

Texts are random tokens: what a forward takes does not depend on them. Points come in an order in which any first part
already spans the grid, so that a short measurement still says something about all of it. Each point is timed several
times, and the lower quartile kept, which other processes on the machine disturb least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from cospec.batches import Segment, TokenBatch
from cospec.draws import Purpose
from cospec.params import SamplingParams
from cospec.policies.cost import Sample
from cospec.protocols import Clock, Drafter, Model
from cospec.types import Budget, Commit, Context

MOST_REPEATS = 9
FEWEST = 6  # points that are measured however long they take
FILLING = 0.4  # share of the time that goes into filling the cache
FEED = 512  # tokens of context computed at once
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured: every context with every number of sequences and of tokens for each.

    Attributes:
        contexts: tokens of each sequence in the cache.
        sequences: at once.
        tokens: computed for each sequence, the known one and the draft behind it.
        chunks: tokens of a prompt computed alone.
    """

    contexts: tuple[int, ...] = (16, 128, 384)
    sequences: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    tokens: tuple[int, ...] = (1, 2, 3, 5, 9)
    chunks: tuple[int, ...] = (64, 256)


QUICK = Grid(contexts=(32, 256), sequences=(1, 4, 16), tokens=(1, 2, 5))
STEPS = Grid(contexts=(32, 256), sequences=(1, 4, 16), tokens=(1, 5), chunks=())


def measure_forwards(model: Model, grid: Grid, seconds: float, clock: Clock = time.perf_counter) -> list[Sample]:
    """Samples of ``model.forward``; points that do not fit the model or its cache are left out."""
    chance, end = np.random.default_rng(0), clock() + seconds
    longest = max(grid.contexts) + max(*grid.tokens, *grid.chunks, 0)
    ids = [f"profile-{n}" for n in range(max(grid.sequences))]
    found: list[Sample] = []
    try:
        ids = _fill(model, ids, min(longest, model.max_len - 1), clock() + seconds * FILLING, clock)
        for context, count, tokens in _spread(grid):
            if len(found) >= FEWEST and clock() >= end:
                break
            if count > len(ids) or context + tokens >= model.max_len:
                continue
            new = tuple(chance.integers(0, model.vocab_size, tokens).tolist())
            drafted = tokens <= max(grid.tokens)  # the others are pieces of a prompt
            parents, first = (tuple(range(-1, tokens - 2)), 0) if drafted else ((), tokens - 1)
            batch = TokenBatch(tuple(Segment(id, context, new, parents, first) for id in ids[:count]))
            spent = _timed(lambda batch=batch: _finished(model.forward(batch)), end, clock)  # type: ignore[misc]
            found.append(Sample(context * count, tokens * count, count, spent))
    finally:
        model.free(ids)
    return found


def measure_steps(
    drafter: Drafter, vocabulary: int, grid: Grid, seconds: float, clock: Clock = time.perf_counter
) -> list[Sample]:
    """Samples of ``drafter.propose``, a pass for each token; ``grid.tokens`` are the lengths of the drafts.

    Drafters that propose nothing for a text that they were not told of step by step (heads) give no samples.
    """
    chance, end = np.random.default_rng(0), clock() + seconds
    found: list[Sample] = []
    for context, count, depth in _spread(grid):
        if len(found) >= FEWEST and clock() >= end:
            break
        texts = [chance.integers(0, vocabulary, context).tolist() for _ in range(count)]
        contexts = [Context(f"profile-{n}", text, 1, GREEDY, n, Purpose.TARGET) for n, text in enumerate(texts)]
        budgets = [Budget(depth, depth)] * count
        try:
            if len(drafter.propose(contexts, budgets)) < count:
                continue
            times: list[float] = []
            while len(times) < MOST_REPEATS and (len(times) < 2 or clock() < end):
                _go_on(drafter, contexts, texts, chance.integers(0, vocabulary, 2).tolist())
                started = clock()
                drafter.propose(contexts, budgets)
                times.append(clock() - started)
        finally:
            drafter.free([each.id for each in contexts])
        found.append(Sample(context * count, count, count, _typical(times), depth))
    return found


def _spread(grid: Grid) -> Iterator[tuple[int, int, int]]:
    """Points (context, sequences, tokens each), the corners first, then in an order without pattern."""
    points: list[tuple[int, int, int]] = list(product(grid.contexts, grid.sequences, grid.tokens))
    points += [(grid.contexts[0], 1, chunk) for chunk in grid.chunks]
    first, second, third = ({row[0], row[-1]} for row in (grid.contexts, grid.sequences, grid.tokens))
    corners = list(product(first, second, third))
    others = [point for point in points if point not in corners]
    shuffled = np.random.default_rng(1).permutation(len(others))
    yield from sorted(corners, key=lambda point: point[1] * point[2])
    for place in shuffled:
        yield others[place]


def _fill(model: Model, ids: Seq[str], length: int, end: float, clock: Clock) -> list[str]:
    """Fill the cache of as many sequences as time and room allow, one at least; a point uses what it needs of each."""
    chance = np.random.default_rng(2)
    filled: list[str] = []
    for id in ids:
        model.pages.attach(id, ())
        if (filled and clock() >= end) or not model.pages.reserve(id, length):
            model.free([id])
            break
        for start in range(0, length, FEED):
            piece = tuple(chance.integers(0, model.vocab_size, min(FEED, length - start)).tolist())
            model.forward(TokenBatch((Segment(id, start, piece, logits_from=len(piece)),)))
        filled.append(id)
    return filled


def _timed(call: Callable[[], None], end: float, clock: Clock) -> float:
    """Seconds of a call, after one that is not counted."""
    call()
    times: list[float] = []
    while len(times) < MOST_REPEATS and (len(times) < 2 or clock() < end):
        started = clock()
        call()
        times.append(clock() - started)
    return _typical(times)


def _typical(times: Seq[float]) -> float:
    """The lower quartile: other processes make calls slower, never faster."""
    return float(np.quantile(times, 0.25))


def _finished(logits: torch.Tensor) -> None:
    """Wait for the device."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)


def _go_on(drafter: Drafter, contexts: Seq[Context], texts: Seq[list[int]], tokens: list[int]) -> None:
    """Two more committed tokens for everybody, none of which was drafted."""
    commits = []
    for context, text in zip(contexts, texts, strict=True):
        commits.append(Commit(context.id, len(text), tuple(tokens), (), len(text) + 1))
        text.extend(tokens)
    drafter.commit(commits)
