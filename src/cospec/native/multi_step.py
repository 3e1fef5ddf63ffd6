"""Several steps of the same requests as one call into the native library: draft, score, verify, and again.

One forward of the target serves all requests of a step. The library makes a draft, or gets a draft. The library
verifies the draft, or hands back the rows of logits by which the verifier decides (a *deferred* request). The outputs
are those of ``TargetVerifier.decide``.

The target may be relaxed towards its drafter, as in DSD's adaptive verification. The drafter then scores all positions.
The rows of the draft are known from drafting; the row after a draft is computed where the whole draft was accepted.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from operator import add
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cospec.acceptance.python_verification import NOT_FINITE, VerifyTask
from cospec.acceptance.token_logprobs import wants_prompt_rows
from cospec.core.interfaces import Model, NativeForward
from cospec.core.model_io import SequenceSlice
from cospec.core.plugin_base import Drafter
from cospec.core.stats import StepTimes
from cospec.core.tree import chain
from cospec.core.types import (
    Draft,
    RequestState,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
    VerifyResult,
)
from cospec.core.verifier import TargetVerifier
from cospec.drafters.dynamic_tree import room
from cospec.native import library, structs
from cospec.native.library import FORMS, PLAIN, NativeBlend, start
from cospec.native.native_drafter import NativeDrafter
from cospec.native.native_request import (
    EDITED,
    NO_ROOM,
    PROMPT_LOGPROBS,
    NativeDrafters,
    NativeRequest,
)
from cospec.native.operators import one_torch_thread
from cospec.rng.random_streams import Floats

LONGEST = 16  # steps of one call
SECONDS = 0.1  # no further step begins that would end later
STREAM_SECONDS = 0.02  # the same where a request streams: its tokens wait for the end of the call
NATIVE_OFF = "native off"
NO_DRAFTER = (0, 0, 0, 0, 0)  # ``NativeDrafter.handles`` of a request without a drafter
MAX_LOGITS_BYTES = 32 << 20  # of the rows that one call of several steps hands back
_SLOT = structs.packer(structs.RequestSlot, without="params")  # ``NativeRequest.words`` follow
_TASK = structs.packer(structs.MultiStepTask)
_HEADER = structs.words(structs.OutputHeader)


class _Slot(NamedTuple):
    """One request of a call.

    Attributes:
        draft: the draft that the library gets; None where there is none, or where the library drafts.
        drafter: drafts in the library; None: no drafter does.
        known_rows: rows of logits of known tokens in the first step.
        rows: rows that verify the draft, ``VerifyTask.count``; of natively made drafts without their nodes.
        deferred: the verifier decides by the rows.
        reads_rows: the verifier reads the rows, for the log-probabilities or because the request is deferred.
    """

    entry: ScheduledRequest
    draft: Draft | None
    drafter: NativeDrafter | None
    known_rows: int
    rows: int
    deferred: bool
    reads_rows: bool


class _Reserved(NamedTuple):
    """A drafter with room for a request, and the number of known tokens that the drafter has read."""

    drafter: NativeDrafter
    read: int


class _Call:
    """The arguments of one call, and the arrays that the structs point to."""

    def __init__(self, num_drafting: int, draft_len: int, blend: NativeBlend) -> None:
        self.num_drafting, self.draft_len = num_drafting, draft_len  # of drafts that the library makes
        self.form, self.weights = FORMS[blend.form], array("d", blend.weights)
        self.divergences = array("d")  # [steps, requests, draft_len + 1] of a relaxed target
        self.slots: list[_Slot] = []
        self.longest = draft_len  # nodes of the longest draft
        self.packed, self.tokens = array("B"), array("q")
        self.held: list[array[int] | Floats] = []

    @property
    def defers(self) -> bool:
        return any([slot.deferred for slot in self.slots])

    @property
    def seconds(self) -> float:
        """The time after which no further step begins."""
        return STREAM_SECONDS if any([slot.entry.sequence.request.streams for slot in self.slots]) else SECONDS

    @property
    def reads_rows(self) -> bool:
        return any([slot.reads_rows for slot in self.slots])

    @property
    def num_rows(self) -> int:
        """Rows of logits of one step, at most."""
        given = sum([len(slot.draft.tokens) for slot in self.slots if slot.draft is not None])
        known = sum([max(slot.known_rows, 1) for slot in self.slots])
        return known + given + self.num_drafting * self.draft_len

    def divergences_of(self, number: int, accepted: int) -> tuple[float, ...]:
        """Return the divergences of the tokens of an output row."""
        first = number * (self.draft_len + 1)
        return tuple(self.divergences[first : first + accepted + 1])

    def draft_addresses(self, draft: Draft) -> tuple[int, int, int]:
        """Return where the tokens, the parents and the distributions of a given draft are; 0 for no distributions."""
        tokens, parents, q = array("q", draft.tokens), array("q", draft.parents), 0
        self.longest = max(self.longest, len(tokens))
        self.held += [tokens, parents]
        if draft.q is not None:
            probs = np.ascontiguousarray(draft.q, dtype=np.float64)
            self.held.append(probs)
            q = library.address(probs)
        return start(tokens), start(parents), q


class NativeMultiStep:
    """Implements ``interfaces.MultiStepRunner``.

    Attributes:
        working: seconds inside of the models so far.
        wakeup_fd: a file descriptor; no further step begins while the descriptor is readable. Negative: none.

    Args:
        verifier: of the target; decides for deferred requests.
    """

    def __init__(self, target: NativeForward, verifier: TargetVerifier, drafters: NativeDrafters) -> None:
        self.working, self.wakeup_fd = 0.0, -1
        self._target, self._verifier, self._drafters = target, verifier, drafters
        self._requests: dict[str, NativeRequest] = {}
        self._run = library.cdll().cospec_multi_step
        self._logits = torch.empty(0)

    @property
    def drafts(self) -> bool:
        """Whether the library may make drafts."""
        return not self._drafters.reason

    @classmethod
    def of(
        cls, target: NativeForward, verifier: TargetVerifier, drafter: Drafter | None, whole: bool
    ) -> NativeMultiStep:
        """Return the runner for a target that ``why_not`` has no reason against.

        Args:
            whole: whether the policy keeps drafts whole; otherwise the library makes none.
        """
        return cls(target, verifier, NativeDrafters(drafter, whole))

    def prepare(self, plan: SchedulerOutput) -> None:
        """See ``interfaces.MultiStepRunner``."""
        if self._drafters.chooses and self.drafts:
            drafting = [entry for entry in plan.entries if entry.budget.depth]
            self._drafters.prepare(drafting, [self._request(entry.sequence).stream_kind for entry in drafting])

    def supports(self, plan: SchedulerOutput) -> dict[str, str]:
        """See ``interfaces.MultiStepRunner``."""
        longest = max([entry.budget.depth for entry in plan.entries])
        reasons, drafting, lengths = dict[str, str](), dict[str, list[str]](), dict[str, list[tuple[str, int]]]()
        drafters = dict[str, NativeDrafter]()
        for entry in plan.entries:
            sequence, budget = entry.sequence, entry.budget
            id, native = sequence.request.id, self._request(sequence)
            drafter = self._drafters.of(sequence, budget, native.stream_kind) if budget.depth else None
            ahead = native.tokens_ahead(sequence, plan.max_steps, longest)
            reason = _reason(entry, native, drafter, ahead)
            if reason:
                reasons[id] = reason
            if isinstance(drafter, NativeDrafter):
                drafters[drafter.name] = drafter
                if not reason:
                    drafting.setdefault(drafter.name, []).append(id)
                length = len(sequence.tokens) + max(ahead, room(budget))
                lengths.setdefault(drafter.name, []).append((id, length))
        for name, ids in drafting.items():
            if not drafters[name].has_room(lengths[name]):
                reasons |= dict.fromkeys(ids, NO_ROOM)
        return reasons

    def run(
        self,
        entries: Sequence[ScheduledRequest],
        steps: int,
        drafts: Mapping[str, Draft | None],
        blend: NativeBlend = PLAIN,
    ) -> tuple[list[StepOutput], StepTimes]:
        """See ``interfaces.MultiStepRunner``.

        Raises:
            RuntimeError: the library refuses the batch, because a token, a length or a page table is invalid.
        """
        planned = [0 if entry.sequence.id in drafts else entry.budget.depth for entry in entries]
        most = max(planned)
        scores = blend.form != PLAIN.form  # the drafter, all positions
        reserved = [
            self._reserve(entry, steps, most, not drafts) if scores or depth else None
            for entry, depth in zip(entries, planned, strict=True)
        ]
        assert not scores or all(reserved), "the drafter of a blend has room, or ``supports`` was not asked"
        depths = [depth if own else 0 for depth, own in zip(planned, reserved, strict=True)]
        longest = max(depths)
        names = ["" if own is None else own.drafter.name for own in reserved]
        # native drafts first, those of one drafter together, the longest first
        order = sorted(range(len(entries)), key=lambda place: (not depths[place], names[place], -depths[place]))
        call = _Call(len(depths) - depths.count(0), longest, blend)
        given = {id: draft for id, draft in drafts.items() if draft is not None}
        tasks, slices = self._verifier.lay_out([entries[place] for place in order], given)
        if self._drafters.chooses:
            own = [entry for entry, depth in zip(entries, depths, strict=True) if depth]
            self._drafters.begin(own, [self._request(entry.sequence).stream_kind for entry in own])
        for place, task, part in zip(order, tasks, slices, strict=True):
            self._add(call, task, part, reserved[place])
        with one_torch_thread() if call.reads_rows else nullcontext():  # torch handles rows of logits alone
            return self._execute(call, 1 if drafts or call.defers else steps)

    def free(self, ids: Sequence[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        for id in ids:
            self._requests.pop(id, None)

    def _reserve(self, entry: ScheduledRequest, steps: int, longest: int, supported: bool) -> _Reserved | None:
        """Return the entry's drafter with pages for a call, see ``NativeRequest.tokens_ahead``.

        None: since ``supports``, Python drafted for other requests of the step, and took the pages or lost the drafter.

        Args:
            supported: whether the answer of ``supports`` still holds.
        """
        native = self._request(entry.sequence)
        drafter = self._drafters.of(entry.sequence, entry.budget, native.stream_kind)
        if isinstance(drafter, str):
            return None
        ahead = native.tokens_ahead(entry.sequence, steps, longest)
        if not supported and entry.budget.depth and drafter.reason_against(entry, ahead):
            return None
        read = drafter.reserve(entry.sequence, ahead)
        return None if read is None else _Reserved(drafter, read)

    def _add(self, call: _Call, task: VerifyTask, part: SequenceSlice, own: _Reserved | None) -> None:
        """Add a request to a call; its drafter, if any, drafts in the library."""
        entry, draft = task.entry, task.draft
        sequence = entry.sequence
        native = self._request(sequence)
        known, computed, end = sequence.tokens, sequence.computed, sequence.computed + entry.num_tokens
        drafter, fed, depth, handles = None, computed, 0, NO_DRAFTER
        if own is not None:
            drafter, fed, depth = own.drafter, own.read, entry.budget.depth
            handles = drafter.handles(sequence.id)
        verified = task.count > 0
        odd = draft is not None and not native.verifies
        deferred = wants_prompt_rows(sequence) or (verified and (native.edits or odd))
        nodes = 0 if draft is None else len(draft.tokens)
        known_rows = task.last - task.first - nodes
        reads = deferred or (verified and sequence.request.sampling.logprobs is not None)
        call.slots.append(_Slot(entry, draft, drafter, known_rows, task.count, deferred, reads))
        call.tokens.extend(known[fed:end])
        words = _SLOT.pack(
            depth or nodes, end, computed, fed, native.max_len - end, part.logits_from, deferred,
            *self._target.pages(sequence.id), *handles, *native.stops.buffer_info(), native.stream_kind,
            *(call.draft_addresses(draft) if draft is not None else (0, 0, 0)),
        )  # fmt: skip
        call.packed.frombytes(words + native.words)

    def _execute(self, call: _Call, steps: int) -> tuple[list[StepOutput], StepTimes]:
        """Run the library, and read its outputs."""
        count, width = len(call.slots), _HEADER + call.longest
        logits = None
        if call.reads_rows:
            rows = call.num_rows
            steps = max(1, min(steps, MAX_LOGITS_BYTES // (4 * rows * self._target.vocab_size)))
            logits = self._room(steps * rows)
        output, fed = array("q", bytes(8 * steps * count * width)), array("q", bytes(8 * count))
        if call.form:
            call.divergences = array("d", bytes(8 * steps * count * (call.draft_len + 1)))
        seconds = array("d", bytes(24 * steps))
        task = _TASK.pack(
            *self._target.handles, start(call.packed), start(call.tokens), count, call.num_drafting,
            call.draft_len, steps, call.seconds, self.wakeup_fd, start(output), width, start(fed), start(seconds),
            0 if logits is None else logits.data_ptr(), call.form, start(call.weights),
            start(call.divergences) if call.form else 0,
        )  # fmt: skip
        steps = self._run(task)
        if not steps:
            raise RuntimeError(f"the native library refuses a batch of {count} requests")
        draft, score, verify = (seconds[kind : 3 * steps : 3] for kind in range(3))
        self.working += sum(draft) + sum(score)
        for slot, kept in zip(call.slots, fed, strict=True):
            if slot.drafter is not None:
                slot.drafter.report_read(slot.entry.sequence.id, kept)
        each = tuple(zip(draft, map(add, score, verify), strict=True))
        return self._outputs(call, output[: steps * count * width], logits), StepTimes.of(each)

    def _outputs(self, call: _Call, output: array[int], logits: Tensor | None) -> list[StepOutput]:
        """Return the outputs of all steps; ``output`` has a row for each request and step."""
        count, width, row, words = len(call.slots), _HEADER + call.longest, 0, output.tolist()
        lengths = [len(slot.entry.sequence.tokens) for slot in call.slots]
        outputs, deferred = list[StepOutput](), list[VerifyTask]()
        for number, place in enumerate(range(0, len(words), width)):
            request, first, begin = number % count, row, place + _HEADER
            entry, draft, drafter, known_rows, verified, defers, reads_rows = call.slots[request]
            drafted, accepted, token, bonus = words[place:begin]
            if draft is not None:
                path = tuple(words[begin : begin + accepted])
            else:
                path = tuple(range(accepted))
                if drafted and drafter is not None:
                    nodes = tuple(words[begin : begin + drafted])
                    draft = Draft(entry.sequence.id, lengths[request], nodes, chain(drafted), (drafter.name,) * drafted)
            row += drafted + (known_rows if number < count else 1)
            if defers:
                deferred.append(VerifyTask(entry, draft, first, row, verified))
            elif bonus < 0:
                outputs.append(StepOutput(entry, draft, None, error=NOT_FINITE))
            elif token < 0:
                outputs.append(StepOutput(entry, None, None))
            else:
                result = VerifyResult(path, token, bonus == 1)
                lengths[request] += accepted + 1
                if reads_rows and logits is not None:
                    task = VerifyTask(entry, draft, first, row, 1 + drafted)
                    outputs.append(self._verifier.output_of(task, result, logits))
                elif call.form:
                    divergences = call.divergences_of(number, accepted)
                    outputs.append(StepOutput(entry, draft, result, divergences=divergences))
                else:
                    outputs.append(StepOutput(entry, draft, result))
        if deferred and logits is not None:
            outputs += self._verifier.decide(deferred, logits[:row])
        return outputs

    def _room(self, rows: int) -> Tensor:
        """Return room for ``rows`` of logits, kept for the next call unless the room is large."""
        wanted, vocab_size = rows * self._target.vocab_size, self._target.vocab_size
        if wanted <= self._logits.numel():
            return self._logits[:wanted].view(rows, vocab_size)
        made = torch.empty(wanted)
        if 4 * wanted <= MAX_LOGITS_BYTES:
            self._logits = made
        return made.view(rows, vocab_size)

    def _request(self, sequence: RequestState) -> NativeRequest:
        request = sequence.request
        found = self._requests.get(request.id)
        if found is None or found.request is not request:
            found = self._requests[request.id] = NativeRequest.of(request, self._verifier.acceptance_method(sequence))
        return found


def _reason(
    entry: ScheduledRequest, native: NativeRequest, drafter: NativeDrafter | str | None, ahead: int
) -> str | None:
    """Return why a part of the entry's step uses the Python path, apart from the drafter's free pages.

    Args:
        drafter: of the entry's draft, or why the library has none; None without a draft.
    """
    if native.edits:
        return EDITED
    if wants_prompt_rows(entry.sequence):
        return PROMPT_LOGPROBS
    if drafter is None or isinstance(drafter, str):
        return drafter
    return native.draft_reason or drafter.reason_against(entry, ahead)


def why_not(target: Model) -> str | None:
    """Return why no step of the target runs as one native call; None where steps can."""
    if not library.available():
        return "the library is not built"
    return "the target has no native forward" if target.native_forward is None else None
