"""Several steps of the same requests as one call into the native library: draft, score, verify, and again.

``supports`` says in advance which requests of a step the library can run. The outputs of each step are those that
``Sequential`` finds in Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

import numpy as np

from cospec.acceptance.reference import NOT_FINITE
from cospec.core.interfaces import Model, NativeForward
from cospec.core.plugins import AcceptanceMethod, DraftCache, Drafter
from cospec.core.stats import StepTimes
from cospec.core.types import (
    Draft,
    Request,
    RequestState,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
    VerifyResult,
)
from cospec.core.verifier import can_be_verified
from cospec.drafters.draft_kv_cache import CATCH_UP_TOKENS
from cospec.native import library, structs
from cospec.native.library import start
from cospec.native.verifier import supports, words_of

LONGEST = 8  # steps of one call
SECONDS = 0.02  # that no further step may go beyond: how long a caller may have to wait
NATIVE_OFF = "native off"
PREFILL = "prefill"
TREE = "tree draft"
NO_ROOM = "no room in the drafter's KV cache"
NO_FORWARD = "the drafter has no native forward"
_SLOT = structs.packer(structs.RequestSlot, without="params")  # ``words_of`` packs these
_TASK = structs.packer(structs.MultiStepTask)
_HEAD = 4  # words before the drafted tokens of a round


@dataclass(frozen=True, slots=True)
class _NativeRequest:
    """What the library reads of a request: the same in every step.

    Attributes:
        reason: why no step of the request can be run; None where steps can.
        draft_reason: why the library cannot draft for the request.
        method_reason: why the library cannot verify drafts of the request.
        max_len: known tokens that the request may have in the end.
    """

    request: Request
    reason: str | None
    draft_reason: str | None
    method_reason: str | None
    words: bytes = b""
    stops: array[int] = field(default_factory=lambda: array("q"))
    max_len: int = 0
    stream_kind: int = 0


@dataclass(frozen=True, slots=True)
class _Drafting:
    """The drafter as the library runs it."""

    kv_cache: DraftCache
    direct: NativeForward
    name: str


@dataclass(frozen=True, slots=True)
class _Job:
    """What the library is given: ``csrc/spec/multi_step.h`` tells of each."""

    slots: array[int]
    tokens: array[int]
    drafting: int
    depth: int
    drafts: array[int] | None = None  # that came along


class NativeMultiStep:
    """Implements ``interfaces.MultiStepRunner``.

    Attributes:
        working: seconds inside of the models so far.
        wakeup_fd: a file descriptor; once it can be read no further step begins. Less than 0: none.

    Args:
        method_of: the acceptance method of a request.
        drafting: the drafter; a sentence where the library cannot draft, with the reason.
    """

    def __init__(
        self,
        target: NativeForward,
        method_of: Callable[[RequestState], AcceptanceMethod],
        drafting: _Drafting | str,
    ) -> None:
        self.working, self.wakeup_fd = 0.0, -1
        self._target, self._method_of = target, method_of
        self._drafting = None if isinstance(drafting, str) else drafting
        self._no_drafting = drafting if isinstance(drafting, str) else ""
        self._requests: dict[str, _NativeRequest] = {}
        self._run = library.cdll().cospec_multi_step

    @property
    def drafts(self) -> bool:
        """Whether it makes drafts."""
        return self._drafting is not None

    @classmethod
    def of(
        cls, target: Model, method_of: Callable[[RequestState], AcceptanceMethod], drafter: Drafter | None, whole: bool
    ) -> NativeMultiStep | None:
        """None where ``why_not(target)`` has a reason. Drafts where the drafter can and drafts stay ``whole``."""
        if target.direct is None:
            return None
        return cls(target.direct, method_of, _drafting(drafter, whole))

    def supports(self, plan: SchedulerOutput) -> dict[str, str]:
        """See ``interfaces.MultiStepRunner``."""
        ahead = plan.max_steps * (1 + max([entry.budget.depth for entry in plan.entries]))
        why, lengths = dict[str, str](), list[tuple[str, int]]()
        for entry in plan.entries:
            reason = self._supports(entry, ahead)
            if reason is not None:
                why[entry.sequence.id] = reason
            elif entry.budget.depth:
                lengths.append((entry.sequence.id, len(entry.sequence.tokens) + ahead))
        if lengths and self._drafting is not None and not self._drafting.kv_cache.model.pages.can_allocate(lengths):
            why |= dict.fromkeys([id for id, _ in lengths], NO_ROOM)
        return why

    def _supports(self, entry: ScheduledRequest, ahead: int) -> str | None:
        """Why an entry cannot be run, the drafter's free room apart.

        Args:
            ahead: tokens that the drafter's cache has to have room for behind the known ones.
        """
        native = self._request(entry.sequence)
        if native.reason is not None:
            return native.reason
        if entry.sequence.computed != len(entry.sequence.tokens) - 1:
            return PREFILL
        if entry.budget.release:
            return "the drafter forgets the request"
        return self._supports_drafting(entry, native, ahead) if entry.budget.depth else None

    def _supports_drafting(self, entry: ScheduledRequest, native: _NativeRequest, ahead: int) -> str | None:
        sequence, budget, known, drafting = entry.sequence, entry.budget, len(entry.sequence.tokens), self._drafting
        if drafting is None:
            return self._no_drafting
        if native.draft_reason is not None:
            return native.draft_reason
        if not budget.is_chain:
            return TREE
        if budget.confident or budget.threshold:
            return "a draft whose length depends on its confidence"
        if drafting.kv_cache.backlog_len(sequence.id, known) > CATCH_UP_TOKENS:
            return "the drafter has a long backlog"
        return NO_ROOM if known + ahead > drafting.kv_cache.model.max_len else None

    def run(self, entries: Sequence[ScheduledRequest], steps: int) -> tuple[list[StepOutput], StepTimes]:
        """See ``interfaces.MultiStepRunner``."""
        entries = sorted(entries, key=_depth, reverse=True)  # as the library wants them
        depth, slots, tokens = entries[0].budget.depth, array("B"), array("q")
        for entry in entries:
            slots.frombytes(self._slot(entry, steps * (depth + 1), tokens))
        drafting = sum([entry.budget.depth > 0 for entry in entries])
        return self._go(entries, steps, _Job(slots, tokens, drafting, depth))

    def supports_drafts(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> dict[str, str]:
        """See ``interfaces.MultiStepRunner``."""
        found = [(entry.sequence.id, self._supports_draft(entry, drafts.get(entry.sequence.id))) for entry in entries]
        return {id: reason for id, reason in found if reason is not None}

    def _supports_draft(self, entry: ScheduledRequest, draft: Draft | None) -> str | None:
        native, known = self._request(entry.sequence), len(entry.sequence.tokens)
        if native.reason is not None:
            return native.reason
        if entry.sequence.computed != known - 1:
            return PREFILL
        if draft is None:
            return None
        if draft.base_len != known or not can_be_verified(draft, self._target.vocab_size):
            return "the draft cannot be verified"
        return native.method_reason if draft.is_chain else TREE

    def verify(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> list[StepOutput]:
        """See ``interfaces.MultiStepRunner``."""
        depth = max([len(draft.tokens) for draft in drafts.values()], default=0)
        slots, tokens, drafted, held = array("B"), array("q"), array("q"), []
        for entry in entries:
            sequence, native = entry.sequence, self._request(entry.sequence)
            draft, base, count, q = drafts.get(sequence.id), len(sequence.tokens), 0, 0
            if draft is not None:
                count = len(draft.tokens)
                drafted.extend(draft.tokens)
                if draft.q is not None:
                    held.append(np.ascontiguousarray(draft.q, dtype=np.float64))
                    q = library.address(held[-1])
            drafted.extend([-1] * (depth - count))
            tokens.append(sequence.tokens[-1])
            slots.frombytes(self._pack(native, (count, base, base - 1), (0, 0), q))
        return self._go(entries, 1, _Job(slots, tokens, 0, depth, drafted), drafts)[0]

    def free(self, ids: Sequence[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        for id in ids:
            self._requests.pop(id, None)

    def _slot(self, entry: ScheduledRequest, ahead: int, tokens: array[int]) -> bytes:
        """A ``RequestSlot``; appends the request's tokens that are not yet fed to ``tokens``."""
        sequence, budget = entry.sequence, entry.budget
        known, native = sequence.tokens, self._request(sequence)
        base = len(known)
        fed, own, drafting = base - 1, (0, 0), self._drafting
        if budget.depth and drafting is not None:
            held = drafting.kv_cache.lease(sequence.id, known, ahead)
            assert held is not None, "``supports`` found room"
            fed, own = held, drafting.direct.pages(sequence.id)
        tokens.extend(known[fed:])
        return self._pack(native, (budget.depth, base, fed), own, 0)

    def _pack(self, native: _NativeRequest, lengths: tuple[int, int, int], own: tuple[int, int], q: int) -> bytes:
        """A ``RequestSlot``; ``lengths`` are those of the draft, of what is known and of what is fed."""
        where = *self._target.pages(native.request.id), *own, *native.stops.buffer_info()
        return _SLOT.pack(*lengths, native.max_len - lengths[1], *where, native.stream_kind, q) + native.words

    def _go(
        self, entries: Sequence[ScheduledRequest], steps: int, job: _Job, drafts: Mapping[str, Draft] | None = None
    ) -> tuple[list[StepOutput], StepTimes]:
        """Have the library do it.

        Raises:
            RuntimeError: the library refuses the batch, whose layout is wrong.
        """
        count, size = len(entries), _HEAD + job.depth
        written, fed = array("q", bytes(8 * steps * count * size)), array("q", bytes(8 * count))
        seconds = array("d", bytes(24 * steps))
        own = (0, 0) if self._drafting is None else self._drafting.direct.names
        task = _TASK.pack(
            *self._target.names, *own, start(job.slots), start(job.tokens),
            start(job.drafts) if job.drafts else 0, count, job.drafting, job.depth, steps, SECONDS,
            self.wakeup_fd, start(written), start(fed), start(seconds),
        )  # fmt: skip
        steps = self._run(task)
        if not steps:
            raise RuntimeError(f"the native library refuses a batch of {count} requests")
        draft, score, verifier = (seconds[kind : 3 * steps : 3] for kind in range(3))
        self.working += sum(draft) + sum(score)
        if self._drafting is not None:
            for entry, kept in zip(entries[: job.drafting], fed, strict=False):
                self._drafting.kv_cache.release_lease(entry.sequence.request.id, kept)
        each = tuple(zip(draft, map(add, score, verifier), strict=True))
        return self._outcomes(entries, written[: steps * count * size], size, drafts), StepTimes.of(each)

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

    def _request(self, sequence: RequestState) -> _NativeRequest:
        request = sequence.request
        found = self._requests.get(request.id)
        if found is None or found.request is not request:
            found = self._requests[request.id] = _native_request(request, self._method_of(sequence))
        return found


def why_not(target: Model) -> str | None:
    """Why no step of the target can be run as one native call; None where steps can."""
    if not library.available():
        return "the library is not built"
    return "the target has no native forward" if target.direct is None else None


def _drafting(drafter: Drafter | None, whole: bool) -> _Drafting | str:
    if drafter is None:
        return "no drafter"
    if not whole:
        return "the policy cuts drafts"
    own = drafter.draft_kv_cache
    direct = None if own is None else own.model.direct
    return NO_FORWARD if own is None or direct is None else _Drafting(own, direct, drafter.name)


def _native_request(request: Request, method: AcceptanceMethod) -> _NativeRequest:
    params = request.sampling
    cut = "truncated sampling" if params.truncates and not params.greedy else None
    reason, method_reason = _reason(request), supports(method)
    if reason is not None or params.max_tokens is None:
        return _NativeRequest(request, reason, cut, method_reason)
    return _NativeRequest(
        request,
        None,
        cut or method_reason,
        method_reason,
        words_of(request, method),
        array("q", params.stop_token_ids),
        len(request.prompt) + params.max_tokens,
        method.stream_kind,
    )


def _reason(request: Request) -> str | None:
    """Why no step of a request can be run, whatever its drafts are."""
    params = request.sampling
    if params.logprobs is not None:
        return "logprobs"
    if params.prompt_logprobs is not None:
        return "prompt_logprobs"
    if params.edits_logits:
        return "penalties, bias or min_tokens"
    if request.speculation.policy is not None:
        return "a policy of its own"
    return "no max_tokens" if params.max_tokens is None else None


def _depth(entry: ScheduledRequest) -> int:
    return entry.budget.depth
