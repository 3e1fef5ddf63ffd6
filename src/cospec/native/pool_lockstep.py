"""All positions of a pool's lockstep drafting as one native call: ``csrc/spec/pool_lockstep.cpp``.

Drafts and candidates equal those of ``drafters/pool/lockstep.py``, bit for bit. Routing, weights and feedback are in
Python alone. ``why_not`` decides in advance whether a step can run here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from cospec.core.model_io import TokenBatch
from cospec.core.tree import chain
from cospec.core.types import Draft
from cospec.drafters.calibration import PRIOR
from cospec.drafters.pool.candidates import HOPELESS
from cospec.drafters.pool.combiners.combiner import UNKNOWN, Candidate, CombineTask, StepCandidates
from cospec.drafters.pool.lockstep import taking
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.state import EDGE
from cospec.native import library, structs
from cospec.native.library import address, start
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind

_BATCH = structs.packer(structs.PoolBatch)
_DRAFTER = structs.packer(structs.LockstepDrafter)
_MIX = structs.packer(structs.MixBuffers)


def why_not(session: LockstepSession, tasks: Sequence[CombineTask]) -> str:
    """Return why a step needs the readable loop; empty if the native call can run the step.

    ``cospec:python_path_requests_total`` does not count this reason: a pool has no native forward of its own, so each
    of its requests is counted once, by ``native_request.NO_FORWARD``.
    """
    if not (session.native and library.available()):
        return "native off"
    for task in tasks:
        params = task.context.sampling
        if params.edits_logits or (params.truncates and not params.greedy):
            return "edited logits"
    for member in taking(tasks):
        if member in session.elsewhere:
            return "a drafter on a node"
        native_forward = session.steppers[member].model.native_forward
        if native_forward is None or native_forward.vocab_size != session.vocab_size:
            return "a drafter without a native forward"
        if session.members[member].deadline is not None:
            return "a deadline"
    return ""


def combine(
    session: LockstepSession, tasks: Sequence[CombineTask], names: Sequence[str], branches: bool, mixes: bool
) -> list[Draft]:
    """Return one draft for each task with candidates, and fill in the candidate sets.

    Args:
        branches: the drafts are trees.
        mixes: tokens come from the mixture of all distributions; otherwise paths of the best candidates are fused.

    Raises:
        RuntimeError: the library refused a batch.
    """
    step = _Step(session, tasks)
    layout, drafters = step.layout, step.open()
    mix = _Mixtures.of(step) if mixes else None
    batch, jobs = step.batch(), array("B", b"".join([drafter.packed for drafter in drafters]))
    given = (start(batch), start(jobs), len(drafters), start(mix.packed) if mix is not None else None)
    fed, spent = start(step.ints) + 8 * layout.fed, start(step.floats) + 8 * layout.seconds
    if not library.cdll().cospec_pool_lockstep(*given, fed, spent):
        raise RuntimeError("The native library refused the batch of a drafter in lockstep.")
    *seconds, reading = step.floats[layout.seconds : layout.seconds + len(drafters) + 1]
    session.reading += reading
    paths = step.paths(layout.fed)
    for drafter, each in zip(drafters, seconds, strict=True):
        guard, stepper = session.members[drafter.member], session.steppers[drafter.member]
        guard.spend(each)
        ids = [tasks[row].context.id for row in drafter.rows]
        guard.call(None, stepper.extend, ids, [paths[row] for row in drafter.rows])
    step.note_candidates(mix)
    return step.drafts(names, branches, mix)


@dataclass(frozen=True, slots=True)
class _Drafter:
    """One drafter of the call, its ``LockstepDrafter``, and the arrays that the struct points to."""

    member: int
    rows: Sequence[int]
    packed: bytes
    arrays: tuple[array[int], ...]


class _Layout:
    """Offsets of the arrays of a step in one block of integers and one of floats, for one shape of a step."""

    def __init__(self, rows: int, members: int, depth: int, room: int) -> None:
        cells = depth * members * rows
        self.requests = structs.packer(structs.PoolRequest, rows)
        self.candidates, self.q = 0, 2 * cells
        self.spans = self.q + cells
        self.main_path = self.spans + 2 * members * rows
        self.path_len = self.main_path + rows * depth
        self.active, self.fed, self.counts = [self.path_len + number * rows for number in (1, 2, 3)]
        self.tokens = self.counts + rows  # of the drafts
        self.parents, self.owners, self.ints = [self.tokens + number * rows * room for number in (1, 2, 3)]
        self.outputs = (self.main_path, self.path_len, self.active, self.counts)
        self.nodes = (self.tokens, self.parents, self.owners)
        self.weights, self.odds, self.chances = [number * rows * members for number in (0, 1, 2)]
        self.shares = self.chances + 2 * cells
        self.confidence = self.shares + cells
        self.seconds = self.confidence + rows * room
        self.floats = self.seconds + members + 1


_layout = lru_cache(256)(_Layout)


class _Step:
    """The arrays of one step, as ``csrc/spec/pool_batch.h`` explains them."""

    def __init__(self, session: LockstepSession, tasks: Sequence[CombineTask]) -> None:
        self.session, self.tasks = session, tasks
        self.members = session.calibrations.shape[2]
        self.depth = max([min(task.budget.depth, task.budget.max_nodes) for task in tasks])
        self.room = max([task.budget.max_nodes for task in tasks])
        self.rows = 0  # of logits at the first position
        self.layout = layout = _layout(len(tasks), self.members, self.depth, self.room)
        self.ints = array("q", bytes(8 * layout.ints))
        self.floats = array("d", [each for task in tasks for each in task.weights])
        self.floats.extend([each for task in tasks for each in task.odds])
        self.floats.frombytes(bytes(8 * (layout.floats - len(self.floats))))

    def open(self) -> list[_Drafter]:
        """Start the drafters; drafters that fail, and sequences without room, are left out."""
        drafters: list[_Drafter] = []
        for member, rows in taking(self.tasks).items():
            guard, stepper = self.session.members[member], self.session.steppers[member]
            contexts = [self.tasks[row].context for row in rows]
            depths = [min(self.tasks[row].budget.depth, self.tasks[row].budget.max_nodes) for row in rows]
            batch: TokenBatch = guard.call(TokenBatch(()), stepper.prepare, contexts, depths)
            native_forward = stepper.model.native_forward
            if native_forward is None or not batch.slices:
                continue
            number = {context.id: row for context, row in zip(contexts, rows, strict=True)}
            slices, ids, found = array("q"), array("q"), array("q")
            for part in batch.slices:
                slices.extend((part.start, len(part.tokens), 0, part.logits_from, *native_forward.pages(part.id)))
                ids.extend(part.tokens)
                found.append(number[part.id])
            at = (start(slices), start(ids), start(found), len(found))
            packed = _DRAFTER.pack(member, *native_forward.handles, *at)
            drafters.append(_Drafter(member, found, packed, (slices, ids, found)))
            self.rows += len(found)
        return drafters

    def batch(self) -> array[int]:
        """Return the ``PoolBatch``."""
        layout, rows = self.layout, len(self.tasks)
        words, streams = list[float](), list[int]()
        for task in self.tasks:
            context, budget, sampling = task.context, task.budget, task.context.sampling
            greedy, shares = sampling.greedy, context.stream_kind is StreamKind.TARGET
            temperature = 0.0 if greedy else sampling.temperature
            words += (greedy, shares, budget.depth, budget.max_nodes, temperature, budget.threshold)
            base = len(context.tokens)
            streams += (0,) * 6 if greedy else RandomStreams(context.seed, base).stream(base, context.stream_kind)
        texts = self._whole_drafts()
        requests, drawn = array("B", layout.requests.pack(*words)), array("Q", streams)
        self._kept = requests, drawn, texts  # what the struct points to
        calibrations, first, real = self.session.calibrations, start(self.ints), start(self.floats)
        ints = [first + 8 * place for place in (*layout.outputs, *layout.nodes)]
        return array("B", _BATCH.pack(
            rows, self.members, self.depth, self.room, 0, calibrations.shape[-1], PRIOR, EDGE, HOPELESS,
            start(requests), start(drawn), address(calibrations), real, real + 8 * layout.odds,
            first + 8 * layout.spans, *[start(each) for each in texts],
            first, real + 8 * layout.chances, first + 8 * layout.q, real + 8 * layout.shares,
            *ints, real + 8 * layout.confidence,
        ))  # fmt: skip

    def _whole_drafts(self) -> tuple[array[Any], ...]:
        """Fill in the spans; returns tokens, parents and confidences of all whole drafts."""
        tokens, parents, raw = list[int](), list[int](), list[float]()
        for row, task in enumerate(self.tasks):
            for member, draft in task.drafts.items():
                span = self.layout.spans + 2 * (row * self.members + member)
                self.ints[span], self.ints[span + 1] = len(tokens), len(draft.tokens)
                tokens += draft.tokens
                parents += draft.parents
                raw += [UNKNOWN] * len(draft.tokens) if draft.confidence is None else draft.confidence.tolist()
        return array("q", tokens), array("q", parents), array("d", raw)

    def paths(self, lengths: int) -> list[list[int]]:
        """Return the main paths; ``lengths`` is the offset of their lengths."""
        first, depth, ints = self.layout.main_path, self.depth, self.ints
        counts = ints[lengths : lengths + len(self.tasks)].tolist()
        starts = range(first, first + len(counts) * depth, depth)
        return [ints[begin : begin + count].tolist() for begin, count in zip(starts, counts, strict=True)]

    def note_candidates(self, mix: _Mixtures | None) -> None:
        """Fill in the candidates of the lockstep drafters, from the first position to the first without any."""
        layout, rows = self.layout, len(self.tasks)
        tokens, chances = self.ints[: layout.q].tolist(), self.floats[layout.chances : layout.shares].tolist()
        stride = 2 * self.members * rows  # from one position to the next
        for row, (task, path) in enumerate(zip(self.tasks, self.paths(layout.path_len), strict=True)):
            for member in task.steppers:
                found: list[Candidate] = []
                for at in range(2 * (member * rows + row), layout.q, stride):
                    token, second, q = tokens[at], tokens[at + 1], None
                    if token < 0:
                        place = self.ints[layout.q + at // 2]
                        if mix is None or not place:
                            break
                        q = mix.at(place)
                    other = None if second < 0 else (second, chances[at + 1])
                    found.append(Candidate(token, chances[at], q, other))
                task.candidate_sets[member] = StepCandidates(path, found)

    def drafts(self, names: Sequence[str], branches: bool, mix: _Mixtures | None) -> list[Draft]:
        """Return the drafts of all sequences with nodes."""
        layout, room, found = self.layout, self.room, list[Draft]()
        confidence = np.array(self.floats[layout.confidence : layout.seconds])
        words = self.ints[layout.counts :].tolist()
        tokens, parents, owners = [first - layout.counts for first in layout.nodes]
        for row, (task, count) in enumerate(zip(self.tasks, words, strict=False)):
            if count:
                at = row * room
                found.append(
                    Draft(
                        task.context.id,
                        task.base,
                        tuple(words[tokens + at : tokens + at + count]),
                        tuple(words[parents + at : parents + at + count]) if branches else chain(count),
                        tuple([names[owner] for owner in words[owners + at : owners + at + count]]),
                        None if mix is None else mix.kept_q(task, row, count),
                        confidence[at : at + count],
                    )
                )
        return found


@dataclass(slots=True)
class _Mixtures:
    """The buffers of the ``mix`` combiner.

    Attributes:
        distributions: ``[steps * rows, V]``, of the drafters; of all steps where drafts keep q, otherwise of one step.
        mixtures: ``[R, steps, V]``, likewise.
    """

    distributions: Floats
    mixtures: Floats
    packed: array[int] = field(default_factory=lambda: array("B"))

    @classmethod
    def of(cls, step: _Step) -> _Mixtures:
        """Make room for a step; none if no request samples."""
        vocab, sampling = step.session.vocab_size, [t for t in step.tasks if not t.context.sampling.greedy]
        kept = step.depth if any([_keeps_q(task) for task in sampling]) else 1
        rows, requests = (step.rows, len(step.tasks)) if sampling else (0, 0)
        found = cls(np.empty((kept * rows, vocab)), np.empty((requests, kept, vocab)))
        places = (address(found.distributions), address(found.mixtures)) if sampling else (0, 0)
        found.packed = array("B", _MIX.pack(*places, vocab, kept))
        return found

    def at(self, place: int) -> Floats:
        """Return the distribution at an address."""
        first = address(self.distributions)
        row: Floats = self.distributions[(place - first) // (8 * self.distributions.shape[1])]
        return row

    def kept_q(self, task: CombineTask, row: int, count: int) -> Floats | None:
        """Return the mixtures that the draft of a sequence was sampled from; None if the draft keeps no q."""
        return self.mixtures[row, :count] if _keeps_q(task) else None


def _keeps_q(task: CombineTask) -> bool:
    return task.context.stream_kind is StreamKind.DRAFT and not task.context.sampling.greedy
