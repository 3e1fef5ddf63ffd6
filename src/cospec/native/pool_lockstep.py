"""All positions of a pool's lockstep drafting as one native call: ``csrc/spec/pool_lockstep.cpp``.

Drafts and candidates equal those of ``drafters/pool/lockstep.py``, bit for bit. Routing, weights and feedback are in
Python alone. ``why_not`` decides in advance whether a step can run here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cospec.core.model_io import TokenBatch
from cospec.core.rng import Floats, RandomStreams, StreamKind
from cospec.core.types import Draft
from cospec.drafters.calibration import PRIOR
from cospec.drafters.pool.candidates import HOPELESS
from cospec.drafters.pool.combiners.combine import UNKNOWN, Candidate, CombineTask, StepCandidates
from cospec.drafters.pool.lockstep import taking
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.state import EDGE
from cospec.native import library, structs
from cospec.native.library import address, start

_BATCH = structs.packer(structs.PoolBatch)
_DRAFTER = structs.packer(structs.LockstepDrafter)
_MIX = structs.packer(structs.MixBuffers)


def why_not(session: LockstepSession, tasks: Sequence[CombineTask]) -> str:
    """Return why a step needs the readable loop; empty if the native call can run the step."""
    if not (session.native and library.available()):
        return "native off"
    for task in tasks:
        params = task.context.sampling
        if params.edits_logits or (params.truncates and not params.greedy):
            return "edited logits"
    for member in taking(tasks):
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
    drafters = step.open()
    mix = _Mixtures.of(step) if mixes else None
    seconds, fed = np.zeros(len(drafters) + 1), np.zeros(len(tasks), np.int64)
    batch, jobs = step.batch(), array("B", b"".join([drafter.packed for drafter in drafters]))
    given = (start(batch), start(jobs), len(drafters), start(mix.packed) if mix is not None else None)
    if not library.cdll().cospec_pool_lockstep(*given, address(fed), address(seconds)):
        raise RuntimeError("The native library refused the batch of a drafter in lockstep.")
    session.reading += float(seconds[-1])
    paths = [path[:count] for path, count in zip(step.main_path.tolist(), fed.tolist(), strict=True)]
    for drafter, spent in zip(drafters, seconds.tolist(), strict=False):
        guard, stepper = session.members[drafter.member], session.steppers[drafter.member]
        guard.spend(spent)
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


class _Step:
    """The arrays of one step, as ``csrc/spec/pool_batch.h`` explains them."""

    def __init__(self, session: LockstepSession, tasks: Sequence[CombineTask]) -> None:
        self.session, self.tasks = session, tasks
        self.members = session.calibrations.shape[2]
        self.depth = max([min(task.budget.depth, task.budget.max_nodes) for task in tasks])
        self.room = max([task.budget.max_nodes for task in tasks])
        self.rows = 0  # of logits at the first position
        rows, cells = len(tasks), (self.depth, self.members, len(tasks))
        self.candidates, self.chances = np.full((*cells, 2), -1, np.int64), np.zeros((*cells, 2))
        self.q = np.zeros(cells, np.int64)
        self.main_path = np.zeros((rows, self.depth), np.int64)
        self.counts = np.zeros(rows, np.int64)  # nodes of each draft
        self.nodes = np.zeros((3, rows, self.room), np.int64)  # tokens, parents, owners
        self.confidence = np.zeros((rows, self.room))

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
        tasks, rows, cells = self.tasks, len(self.tasks), (len(self.tasks), self.members)
        words, streams = list[float](), list[tuple[int, ...]]()
        for context, budget in [(task.context, task.budget) for task in tasks]:
            greedy, shares = context.sampling.greedy, context.stream_kind is StreamKind.TARGET
            temperature = 0.0 if greedy else context.sampling.temperature
            words += (greedy, shares, budget.depth, budget.max_nodes, temperature, budget.threshold)
            base = len(context.tokens)
            streams.append(RandomStreams(context.seed, base).stream(base, context.stream_kind))
        self._requests = array("B", structs.packer(structs.PoolRequest, rows).pack(*words))
        self._streams = np.array(streams, np.uint64)
        self._state = np.array([[0] * rows, [1] * rows])  # path lengths, and whether paths are active
        self._shares = np.empty((rows, self.depth, self.members))
        spans, tokens, parents, raw = np.zeros((*cells, 2), np.int64), list[int](), list[int](), list[float]()
        for row, task in enumerate(tasks):
            for member, draft in task.drafts.items():
                spans[row, member] = len(tokens), len(draft.tokens)
                tokens += draft.tokens
                parents += draft.parents
                raw += [UNKNOWN] * len(draft.tokens) if draft.confidence is None else draft.confidence.tolist()
        texts: list[array[Any]] = [array("q", tokens), array("q", parents), array("d", raw)]
        weights = np.array([[task.weights for task in tasks], [task.odds for task in tasks]])
        self._kept = spans, texts, weights  # what the struct points to
        calibrations = self.session.calibrations
        return array("B", _BATCH.pack(
            rows, self.members, self.depth, self.room, 0, calibrations.shape[-1], PRIOR, EDGE, HOPELESS,
            start(self._requests), address(self._streams), address(calibrations), address(weights[0]),
            address(weights[1]), address(spans), *[start(each) for each in texts],
            address(self.candidates), address(self.chances), address(self.q), address(self._shares),
            address(self.main_path), address(self._state[0]), address(self._state[1]),
            address(self.counts), *map(address, self.nodes), address(self.confidence),
        ))  # fmt: skip

    def note_candidates(self, mix: _Mixtures | None) -> None:
        """Fill in the candidates of the lockstep drafters, from the first position to the first without any."""
        tokens, chances, places = self.candidates.tolist(), self.chances.tolist(), self.q.tolist()
        for row, task in enumerate(self.tasks):
            path = self.main_path[row, : self._state[0, row]].tolist()
            for member in task.steppers:
                found: list[Candidate] = []
                for step in range(self.depth):
                    (token, second), (chance, other) = tokens[step][member][row], chances[step][member][row]
                    q = None
                    if token < 0:
                        if mix is None or not places[step][member][row]:
                            break
                        q = mix.at(places[step][member][row])
                    found.append(Candidate(token, chance, q, None if second < 0 else (second, other)))
                task.candidate_sets[member] = StepCandidates(path, found)

    def drafts(self, names: Sequence[str], branches: bool, mix: _Mixtures | None) -> list[Draft]:
        """Return the drafts of all sequences with nodes."""
        tokens, parents, owners = self.nodes.tolist()
        found: list[Draft] = []
        for row, (task, count) in enumerate(zip(self.tasks, self.counts.tolist(), strict=True)):
            if count:
                found.append(
                    Draft(
                        task.context.id,
                        task.base,
                        tuple(tokens[row][:count]),
                        tuple(parents[row][:count]) if branches else tuple(range(-1, count - 1)),
                        tuple([names[owner] for owner in owners[row][:count]]),
                        None if mix is None else mix.kept_q(task, row, count),
                        self.confidence[row, :count].copy(),
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
