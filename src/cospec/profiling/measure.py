"""Times forwards and drafts over a grid of (context, batched tokens, sequences), within a time limit.

Texts are random tokens, because latency does not depend on the tokens. The first points already span the grid, so that
a short measurement covers all of it. Each point is timed several times. The lower quartile counts, because other
processes disturb the quartile least.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from cospec.core.interfaces import Clock, Model, MultiStepRunner
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.core.types import (
    Commit,
    DraftBudget,
    DraftContext,
    Request,
    RequestState,
    ScheduledRequest,
    SchedulerOutput,
    SpeculationParams,
)
from cospec.policies.latency.forward import LatencySample
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams

MAX_REPEATS = 11
TURNS = 1 + MAX_REPEATS // 2  # the first turn calls each point once, the others twice
MIN_POINTS = 6  # points that are measured without a time limit
GREEDY = SamplingParams(temperature=0.0)
STEPS_PER_CALL = 8  # the steps after the first have realistic processor caches
ENDLESS = 1 << 20


@dataclass(frozen=True, slots=True)
class MeasurementGrid:
    """The measured points: every context with every number of sequences and of tokens.

    Attributes:
        contexts: cached tokens per sequence.
        sequences: sequences per batch.
        tokens: computed tokens per sequence: the known token and the draft.
        chunks: tokens of a prompt computed alone.
        rows: more token counts for one sequence with the smallest context. Kernels process several rows together, so
            latency rises in steps. The position of the steps decides how many draft tokens pay.
    """

    contexts: tuple[int, ...] = (16, 128, 384)
    sequences: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    tokens: tuple[int, ...] = (1, 2, 3, 5, 9)
    chunks: tuple[int, ...] = (64, 256)
    rows: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Cached and computed tokens of the longest sequence."""
        return max(self.contexts) + max((*self.tokens, *self.chunks, *self.rows))


START = MeasurementGrid(
    (64, 256), sequences=(1, 2, 4, 8, 16), tokens=(1, 2, 3, 5), chunks=(96,), rows=(4, 6, 7, 8, 9, 12, 14)
)


def measure_forwards(
    model: Model, grid: MeasurementGrid, seconds: float, clock: Clock = time.perf_counter
) -> list[LatencySample]:
    """Time ``model.forward``; points that exceed the model or its cache are omitted.

    All points are timed in turn, so that a busy moment disturbs one time of each point. Pages are only reserved,
    because cached values do not change the latency.
    """
    rng, end = np.random.default_rng(0), clock() + seconds
    names = [f"profile-{n}" for n in range(max(grid.sequences))]
    ids = _reserve(model, names, min(grid.longest, model.max_len - 1))
    points = [p for p in _grid_points(grid) if p[1] <= len(ids) and p[0] + p[2] < model.max_len]
    batches = [_batch(ids, point, grid, model.vocab_size, rng) for point in points]
    times: list[list[float]] = [[] for _ in points]
    try:
        for turn in range(TURNS):
            for done, place in enumerate(_order(len(points), turn, rng)):
                if clock() >= end and (turn > 1 or done >= MIN_POINTS):
                    break
                started = clock()
                _synchronize(model.forward(batches[place]))
                times[place].append(clock() - started)
    finally:
        model.free(ids)
    # The first time of each point includes warm-up, and counts only if there is no other.
    return [
        LatencySample(context * count, tokens * count, count, _lower_quartile(taken[1:] or taken))
        for (context, count, tokens), taken in zip(points, times, strict=True)
        if taken
    ]


def measure_steps(
    drafter: Drafter, vocabulary: int, grid: MeasurementGrid, seconds: float, clock: Clock = time.perf_counter
) -> list[LatencySample]:
    """Time ``drafter.propose``, one pass per token; ``grid.tokens`` are the draft lengths.

    Drafters that need a step-by-step text (heads) propose nothing here and give no samples.
    """
    rng, end = np.random.default_rng(0), clock() + seconds
    found: list[LatencySample] = []
    for context, count, depth in _grid_points(grid):
        if len(found) >= MIN_POINTS and clock() >= end:
            break
        texts = [rng.integers(0, vocabulary, context).tolist() for _ in range(count)]
        contexts = [DraftContext(f"profile-{n}", text, 1, GREEDY, n, StreamKind.TARGET) for n, text in enumerate(texts)]
        budgets = [DraftBudget(depth, depth)] * count
        try:
            if len(drafter.propose(contexts, budgets)) < count:
                continue
            times: list[float] = []
            while len(times) < MAX_REPEATS and (len(times) < 2 or clock() < end):
                _commit_tokens(drafter, contexts, texts, rng.integers(0, vocabulary, 2).tolist())
                started = clock()
                drafter.propose(contexts, budgets)
                times.append(clock() - started)
        finally:
            drafter.free([each.id for each in contexts])
        found.append(LatencySample(context * count, count, count, _lower_quartile(times), depth))
    return found


def measure_multi_steps(
    target: Model,
    drafter: Drafter,
    grid: MeasurementGrid,
    seconds: float,
    multi_step: MultiStepRunner | None = None,
    clock: Clock = time.perf_counter,
) -> tuple[list[LatencySample], list[LatencySample]]:
    """Time verification and drafting in turn, as steps do: ``target.forward``, ``drafter.propose``.

    Each call leaves its data in the processor's caches: alone in a loop, a small drafter takes half as long. A point of
    one token is a step without drafts. If ``multi_step`` runs whole steps, those calls are timed. Drafters that need a
    step-by-step text (heads) give no samples.
    """
    rng, end = np.random.default_rng(0), clock() + seconds
    count, timer = max(grid.sequences), None if multi_step is None else MultiStepTimer(multi_step)
    ahead = STEPS_PER_CALL * max(grid.tokens + grid.rows) if timer else 0
    texts = {
        context: [
            DraftContext(
                f"profile-{context}-{n}",
                rng.integers(0, target.vocab_size, context).tolist(),
                1,
                GREEDY,
                n,
                StreamKind.TARGET,
            )
            for n in range(count)
        ]
        for context in grid.contexts
    }
    ids: dict[int, list[str]] = {}
    for context, row in texts.items():
        length = min(context + max((*grid.tokens, *grid.chunks, *grid.rows)) + ahead, target.max_len - 1)
        ids[context] = _reserve(target, [each.id for each in row], length)
    points = [p for p in _grid_points(grid) if p[1] <= len(ids[p[0]]) and p[0] + p[2] + ahead < target.max_len]
    batches = [_batch(ids[point[0]], point, grid, target.vocab_size, rng) for point in points]
    forwards: list[list[tuple[float, float]]] = [[] for _ in points]  # cached tokens, seconds
    drafts: list[list[tuple[float, float]]] = [[] for _ in points]
    fed_ids: set[str] = set()  # sequences that the drafter has read
    try:
        for turn in range(TURNS):
            for done, place in enumerate(_order(len(points), turn, rng)):
                if clock() >= end and (turn > 1 or done >= MIN_POINTS):
                    break
                context, several, tokens = points[place]
                contexts, depth = texts[context][:several], 0 if tokens in grid.chunks else tokens - 1
                if depth and not fed_ids.issuperset(each.id for each in contexts):
                    drafter.propose(contexts, [DraftBudget(depth, depth)] * several)
                    fed_ids.update(each.id for each in contexts)
                timed_steps = timer.time_steps(contexts, depth) if timer and tokens not in grid.chunks else []
                for known, drafting, verifying in timed_steps:
                    forwards[place].append((known, verifying))
                    if depth:
                        drafts[place].append((known, drafting))
                if timed_steps:
                    continue
                if depth:
                    started = clock()
                    if len(drafter.propose(contexts, [DraftBudget(depth, depth)] * several)) == several:
                        drafts[place].append((context * several, clock() - started))
                started = clock()
                _synchronize(target.forward(batches[place]))
                forwards[place].append((context * several, clock() - started))
    finally:
        target.free([id for row in ids.values() for id in row])
        drafter.free([each.id for row in texts.values() for each in row])
    return (
        [_sample(x, t * n, n) for (_, n, t), x in zip(points, forwards, strict=True) if x],
        [_sample(x, n, n, t - 1) for (_, n, t), x in zip(points, drafts, strict=True) if x],
    )


def _sample(found: Sequence[tuple[float, float]], tokens: int, sequences: int, passes: int = 1) -> LatencySample:
    """Return the sample of all calls of a point except the first, which includes warm-up."""
    known, seconds = zip(*(found[1:] or found), strict=True)
    return LatencySample(float(np.mean(known)), tokens, sequences, _lower_quartile(seconds), passes)


def _batch(
    ids: Sequence[str], point: tuple[int, int, int], grid: MeasurementGrid, vocabulary: int, rng: np.random.Generator
) -> TokenBatch:
    """Build a batch of tokens after a context: a draft, or a chunk of a prompt."""
    context, count, tokens = point
    new = tuple(rng.integers(0, vocabulary, tokens).tolist())
    drafted = tokens not in grid.chunks
    parents, first = (tuple(range(-1, tokens - 2)), 0) if drafted else ((), tokens - 1)
    return TokenBatch(tuple(SequenceSlice(id, context, new, parents, first) for id in ids[:count]))


def _grid_points(grid: MeasurementGrid) -> Iterator[tuple[int, int, int]]:
    """Yield points (context, sequences, tokens each): the corners first, then the others in random order."""
    points: list[tuple[int, int, int]] = list(product(grid.contexts, grid.sequences, grid.tokens))
    points += [(grid.contexts[0], 1, tokens) for tokens in (*grid.chunks, *grid.rows)]
    first, second, third = ({row[0], row[-1]} for row in (grid.contexts, grid.sequences, grid.tokens))
    corners = list(product(first, second, third))
    others = [point for point in points if point not in corners]
    shuffled = np.random.default_rng(1).permutation(len(others))
    yield from sorted(corners, key=lambda point: point[1] * point[2])
    for place in shuffled:
        yield others[place]


def _order(count: int, turn: int, rng: np.random.Generator) -> Sequence[int]:
    """Return the order of the points in one turn: the grid's order in the first two turns, else shuffled.

    A call's cache hits depend on the call before. So no point may always follow the same point. Every second call
    follows its own point, as in steps; the lower quartile is such a call.
    """
    order = np.arange(count) if turn < 2 else rng.permutation(count)
    return [int(place) for place in np.repeat(order, 1 if turn == 0 else 2)]


def _reserve(model: Model, ids: Sequence[str], length: int) -> list[str]:
    """Reserve pages for as many sequences as fit, without contents."""
    for count, id in enumerate(ids):
        model.pages.open_sequence(id, ())
        if not model.pages.allocate(id, length):
            model.free([id])
            return list(ids[:count])
    return list(ids)


def _lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile: other processes make calls slower, never faster."""
    return float(np.quantile(times, 0.25))


def _synchronize(logits: torch.Tensor) -> None:
    """Wait for the device."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)


def _commit_tokens(
    drafter: Drafter, contexts: Sequence[DraftContext], texts: Sequence[list[int]], tokens: list[int]
) -> None:
    """Commit two more tokens of every sequence, none of which was drafted."""
    commits = []
    for context, text in zip(contexts, texts, strict=True):
        commits.append(Commit(context.id, len(text), tuple(tokens), (), len(text) + 1))
        text.extend(tokens)
    drafter.commit(commits)


class MultiStepTimer:
    """Times steps on known texts, always from the same position, that run as one native call.

    Single steps take longer, mostly independent of the drafts, so drafts would look too cheap. Only the target's pages
    are reserved; the drafter reads the texts, because its state is the starting point.
    """

    def __init__(self, runner: MultiStepRunner) -> None:
        self._runner = runner
        self._sequences: dict[str, RequestState] = {}

    def time_steps(self, contexts: Sequence[DraftContext], depth: int) -> list[tuple[float, float, float]]:
        """Return cached tokens, drafting and verifying seconds of each step; empty if the call is unsupported."""
        sequences = [self._sequence(context) for context in contexts]
        budget = DraftBudget(depth, depth) if depth else DraftBudget()
        entries = tuple(ScheduledRequest(sequence, 1, budget) for sequence in sequences)
        if self._runner.supports(SchedulerOutput(0, entries, STEPS_PER_CALL)):
            return []
        outputs, times = self._runner.run(entries, STEPS_PER_CALL, {})
        known = sum(sequence.computed for sequence in sequences)
        found = []
        for place, (draft, target) in enumerate(times.each or ((times.draft, times.target),)):
            found.append((float(known), draft, target))
            for output in outputs[place * len(entries) : (place + 1) * len(entries)]:
                known += 1 + (len(output.result.path) if output.result is not None else 0)
        return found[1:] or found

    def _sequence(self, context: DraftContext) -> RequestState:
        if context.id not in self._sequences:
            sampling = SamplingParams(temperature=0.0, max_tokens=ENDLESS, ignore_eos=True)
            request = Request(
                context.id, tuple(context.tokens), sampling, 0, speculation=SpeculationParams(acceptance_method="match")
            )
            self._sequences[context.id] = RequestState(request, list(context.tokens), len(context.tokens) - 1)
        return self._sequences[context.id]
