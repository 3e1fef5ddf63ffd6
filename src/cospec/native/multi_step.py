"""Rounds of the same sequences as one call into the native library: draft, score, judge, and again.

Where drafter and target run there, the rule is one of the library's and the policy leaves drafts whole, nothing between
two of these steps has to be decided here; nor between two rounds, as long as the policy's plan lasts. What comes back
are the outcomes of each round, the same as ``Sequential`` finds step by step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from dataclasses import dataclass
from operator import add
from typing import Any

import numpy as np

from cospec.acceptance.reference import NOT_FINITE
from cospec.core.interfaces import Model, NativeForward
from cospec.core.plugins import AcceptanceMethod, DraftCache, Drafter
from cospec.core.stats import StepTimes
from cospec.core.types import (
    Draft,
    DraftBudget,
    Request,
    RequestState,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
    VerifyResult,
)
from cospec.core.verifier import can_be_verified
from cospec.drafters.draft_kv_cache import CATCH_UP_TOKENS
from cospec.native import library
from cospec.native.structs import MultiStepTaskStruct, RequestSlotStruct, packer
from cospec.native.verifier import takes_method, words_of

LONGEST = 8  # rounds of a burst
SECONDS = 0.02  # that no further round may go beyond: how long one who cannot call may have to wait for it
_LANE = packer(RequestSlotStruct, without="params")  # ``words_of`` packs these
_HEAD = 4  # words before the drafted tokens of a round


@dataclass(frozen=True, slots=True)
class _Rider:
    """What the library reads of a request: the same in every round."""

    request: Request
    words: bytes
    stops: array[int]  # tokens that may end it
    most: int  # known tokens that it may have in the end
    stream_kind: int
    cut: bool  # a truncated law, which drafters do not draw from in their own loop
    takes_method: bool  # drafts can be judged here


@dataclass(frozen=True, slots=True)
class _Drafting:
    """The drafter as the library runs it."""

    kv_cache: DraftCache
    direct: NativeForward
    name: str


@dataclass(frozen=True, slots=True)
class _Job:
    """What the library is given: ``csrc/spec/multi_step.h`` tells of each."""

    lanes: array[int]
    tokens: array[int]
    drafting: int
    depth: int
    drafts: array[int] | None = None  # that came along


class NativeMultiStep:
    """Implements ``protocols.NativeMultiStep``.

    Attributes:
        working: seconds inside of the models so far.
        wake: a file descriptor; once it can be read no further round is begun. Less than 0: none.

    Args:
        rule_of: the rule that a sequence is judged by.
        drafting: None where a round that drafts has to be run step by step.
    """

    def __init__(
        self, target: NativeForward, method_of: Callable[[RequestState], AcceptanceMethod], drafting: _Drafting | None
    ) -> None:
        self.working, self.wakeup_fd = 0.0, -1
        self._target, self._rule_of, self._drafting = target, method_of, drafting
        self._riders: dict[str, _Rider | None] = {}
        self._run = library.cdll().cospec_multi_step

    @property
    def drafts(self) -> bool:
        """Whether it makes drafts."""
        return self._drafting is not None

    @classmethod
    def of(
        cls, target: Model, method_of: Callable[[RequestState], AcceptanceMethod], drafter: Drafter | None, whole: bool
    ) -> NativeMultiStep | None:
        """None unless the target's forward is native. Drafts where the drafter's is and drafts stay ``whole``."""
        if target.direct is None:
            return None
        drafting = None
        if whole and drafter is not None and (own := drafter.draft_kv_cache) is not None:
            direct = own.model.direct
            drafting = None if direct is None else _Drafting(own, direct, drafter.name)
        return cls(target.direct, method_of, drafting)

    def run(self, plan: SchedulerOutput) -> tuple[list[StepOutput], StepTimes] | None:
        """See ``protocols.NativeMultiStep``."""
        entries = sorted(plan.entries, key=_depth, reverse=True)  # as the library wants them
        depth, lanes, tokens = entries[0].budget.depth, array("B"), array("q")
        if depth and self._drafting is None:
            return None
        for entry in entries:
            lane = self._lane(entry, plan.rounds * (depth + 1), tokens)
            if lane is None:
                return None
            lanes.frombytes(lane)
        drafting = sum([entry.budget.depth > 0 for entry in entries])
        return self._go(entries, plan.rounds, _Job(lanes, tokens, drafting, depth))

    def verify(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> list[StepOutput] | None:
        """See ``protocols.NativeMultiStep``."""
        depth = max([len(draft.tokens) for draft in drafts.values()], default=0)
        if not depth:
            return None  # ``run`` has had its look at it
        lanes, tokens, drafted, held = array("B"), array("q"), array("q"), []
        for entry in entries:
            sequence, rider = entry.sequence, self._rider(entry.sequence)
            base = len(sequence.tokens)
            if rider is None or sequence.computed != base - 1:
                return None
            draft, count, q = drafts.get(rider.request.id), 0, 0
            if draft is not None:
                fits = draft.base_len == base and draft.is_chain and can_be_verified(draft, self._target.vocab_size)
                if not fits or not rider.takes_method:
                    return None
                count = len(draft.tokens)
                drafted.extend(draft.tokens)
                if draft.q is not None:
                    held.append(np.ascontiguousarray(draft.q, dtype=np.float64))
                    q = library.address(held[-1])
            drafted.extend([-1] * (depth - count))
            tokens.append(sequence.tokens[-1])
            lanes.frombytes(self._pack(rider, (count, base, base - 1), (0, 0), q))
        done = self._go(entries, 1, _Job(lanes, tokens, 0, depth, drafted), drafts)
        return None if done is None else done[0]

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        for id in ids:
            self._riders.pop(id, None)

    def _lane(self, entry: ScheduledRequest, ahead: int, tokens: array[int]) -> bytes | None:
        """A ``RequestSlotStruct``, and behind ``tokens`` its own; None where it has to be run step by step.

        Args:
            ahead: tokens that the drafter's cache is to have room for behind the known ones.
        """
        sequence, budget = entry.sequence, entry.budget
        known, rider = sequence.tokens, self._rider(sequence)
        base = len(known)
        fed, own = base - 1, (0, 0)
        if rider is None or sequence.computed != fed or budget.release:
            return None
        if budget.depth:
            drafting = self._drafting
            if drafting is None or rider.cut or not rider.takes_method or not _only_tokens(budget):
                return None
            held = drafting.kv_cache.lease(rider.request.id, known, ahead)
            if held is None or base - held > CATCH_UP_TOKENS:
                return None
            fed, own = held, drafting.direct.pages(rider.request.id)
        tokens.extend(known[fed:])
        return self._pack(rider, (budget.depth, base, fed), own, 0)

    def _pack(self, rider: _Rider, lengths: tuple[int, int, int], own: tuple[int, int], q: int) -> bytes:
        """A ``RequestSlotStruct``; ``lengths`` are those of the draft, of what is known and of what is fed."""
        where = *self._target.pages(rider.request.id), *own, *rider.stops.buffer_info()
        return _LANE.pack(*lengths, rider.most - lengths[1], *where, rider.stream_kind, q) + rider.words

    def _go(
        self, entries: Sequence[ScheduledRequest], rounds: int, job: _Job, drafts: Mapping[str, Draft] | None = None
    ) -> tuple[list[StepOutput], StepTimes] | None:
        """Have the library do it; None where something is amiss, which the long way tells."""
        count, size = len(entries), _HEAD + job.depth
        written, fed = array("q", bytes(8 * rounds * count * size)), array("q", bytes(8 * count))
        seconds = array("d", bytes(24 * rounds))
        own = (None, None) if self._drafting is None else self._drafting.direct.names
        burst = MultiStepTaskStruct(
            *self._target.names, *own, _start(job.lanes), _start(job.tokens), job.drafts and _start(job.drafts), count,
            job.drafting, job.depth, rounds, SECONDS, self.wakeup_fd, _start(written), _start(fed), _start(seconds),
        )  # fmt: skip
        rounds = self._run(addressof(burst))
        if not rounds:
            return None
        draft, score, verifier = (seconds[kind : 3 * rounds : 3] for kind in range(3))
        self.working += sum(draft) + sum(score)
        if self._drafting is not None:
            for entry, kept in zip(entries[: job.drafting], fed, strict=False):
                self._drafting.kv_cache.release_lease(entry.sequence.request.id, kept)
        each = tuple(zip(draft, map(add, score, verifier), strict=True))
        return self._outcomes(entries, written[: rounds * count * size], size, drafts), StepTimes.of(each)

    def _outcomes(
        self, entries: Sequence[ScheduledRequest], written: array[int], size: int, drafts: Mapping[str, Draft] | None
    ) -> list[StepOutput]:
        """What was decided, ``size`` words for each entry and round; ``drafts`` are those that came along."""
        name = "" if self._drafting is None else self._drafting.name
        bases, outcomes = [len(entry.sequence.tokens) for entry in entries], []
        for place in range(0, len(written), size):
            row = place // size % len(entries)
            drafted, accepted, token, bonus = written[place : place + _HEAD]
            draft, id = None, entries[row].sequence.request.id
            if drafts is not None:
                draft = drafts.get(id)
            elif drafted:
                nodes = tuple(written[place + _HEAD : place + _HEAD + drafted])
                parents = tuple(range(-1, drafted - 1))
                draft = Draft(id, bases[row], nodes, parents, (name,) * drafted)
            if bonus < 0:
                outcomes.append(StepOutput(entries[row], draft, None, error=NOT_FINITE))
            else:
                verdict = VerifyResult(tuple(range(accepted)), token, bonus == 1)
                outcomes.append(StepOutput(entries[row], draft, verdict))
            bases[row] += accepted + 1
        return outcomes

    def _rider(self, sequence: RequestState) -> _Rider | None:
        """None for a request that asks for more than tokens, or in a way that is not the library's."""
        request = sequence.request
        if request.id in self._riders:
            rider = self._riders[request.id]
            if rider is None or rider.request is request:
                return rider
        rider = self._riders[request.id] = _rider(request, self._rule_of(sequence))
        return rider


def _rider(request: Request, acceptance_method: AcceptanceMethod) -> _Rider | None:
    params, words = request.sampling, words_of(request, acceptance_method)
    asks = params.edits_logits or params.logprobs is not None or params.prompt_logprobs is not None
    if asks or request.speculation.policy is not None or params.max_tokens is None:
        return None
    most, cut = len(request.prompt) + params.max_tokens, params.truncates and not params.greedy
    return _Rider(
        request,
        words,
        array("q", params.stop_token_ids),
        most,
        acceptance_method.stream_kind,
        cut,
        takes_method(acceptance_method),
    )


def _only_tokens(budget: DraftBudget) -> bool:
    """Whether the drafter is asked for a chain of tokens, and for nothing that decides how long it is."""
    return budget.is_chain and not budget.confident and not budget.threshold


def _depth(entry: ScheduledRequest) -> int:
    return entry.budget.depth


def _start(words: array[Any]) -> int:
    return words.buffer_info()[0]
