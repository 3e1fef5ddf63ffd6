"""Verifies drafts: one packed forward of the target for all requests of the step, then the acceptance methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from cospec.acceptance import python_verification
from cospec.acceptance.device_draft_probs import DeviceProbs
from cospec.acceptance.python_verification import VerifiedDraft, VerifyTask
from cospec.acceptance.tensor import verify as tensor
from cospec.acceptance.token_logprobs import prompt_logprobs, token_logprobs, wants_prompt_rows
from cospec.core.interfaces import Blend, Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.submitted_step import FinishedFuture
from cospec.core.types import Commit, Draft, RequestState, ScheduledRequest, StepOutput, VerifyResult
from cospec.errors import failure
from cospec.native import acceptance as native_acceptance
from cospec.native import library
from cospec.native.acceptance import NativeAcceptance
from cospec.native.library import NativeBlend, Source

NO_LOGITS = torch.empty(0, 0)
_Verify = Callable[[Sequence[VerifyTask], Tensor], list[VerifiedDraft]]

log = logging.getLogger(__name__)


class TargetVerifier:
    """Verifies by the target distribution, which is ``blend`` of the target's logits, after each request's processors.

    Args:
        acceptance_methods: by name; a request's ``speculation.acceptance_method`` picks one.
        native: whether the native library, or tensors on another device, may verify drafts.
    """

    max_in_flight: ClassVar[int] = 1

    def __init__(
        self, model: Model, blend: Blend, acceptance_methods: Mapping[str, AcceptanceMethod], native: bool = True
    ) -> None:
        self.model, self.blend, self.acceptance_methods = model, blend, acceptance_methods
        self._native = NativeAcceptance() if native and library.available() else None
        self._tensors = native

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """Return the acceptance method that the request resolved to when it was added."""
        name = sequence.request.speculation.acceptance_method
        assert name is not None, "requests are resolved before they are scheduled"
        return self.acceptance_methods[name]

    def submit(
        self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]
    ) -> FinishedFuture[list[StepOutput]]:
        """Call the target, then verify the drafts; the result is there at once."""
        tasks, slices = self.lay_out(entries, drafts)
        logits = self.blend.combine([self.model.forward(TokenBatch(tuple(slices)))])
        return FinishedFuture(self.decide(tasks, logits))

    def lay_out(
        self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]
    ) -> tuple[list[VerifyTask], list[SequenceSlice]]:
        """Return one task and one slice of the batch per entry, in order.

        Stale drafts, and drafts that the request's acceptance method cannot verify, are dropped.
        """
        tasks: list[VerifyTask] = []
        slices: list[SequenceSlice] = []
        row = 0
        for entry in entries:
            draft = self._usable(entry, drafts.get(entry.sequence.request.id)) if drafts else None
            part, count = _slice_of(entry, draft)
            slices.append(part)
            last = row + len(part.tokens) - part.logits_from
            tasks.append(VerifyTask(entry, draft, row, last, count))
            row = last
        return tasks, slices

    def decide(self, tasks: Sequence[VerifyTask], logits: Tensor) -> list[StepOutput]:
        """Verify with logits ``[R, V]`` of the blend; return one output per task, in order. Calls no model."""
        verify, supports = self._implementation(logits)
        supported = [
            task.draft is None or supports(self.acceptance_method(task.entry.sequence)) is None for task in tasks
        ]
        if all(supported):
            results = verify(tasks, logits)
        else:  # each implementation verifies the requests that it supports
            groups = [
                [task for task, each in zip(tasks, supported, strict=True) if each is kind] for kind in (True, False)
            ]
            found = iter(verify(groups[0], logits)), iter(self._verify_in_python(groups[1], logits))
            results = [next(found[0] if each else found[1]) for each in supported]
        return [self.output_of(task, result, logits) for task, result in zip(tasks, results, strict=True)]

    def draws_suffice(self, task: VerifyTask) -> bool:
        """Whether ``accept`` can verify the task by drawn tokens, without logits; pure."""
        params = task.entry.sequence.request.sampling
        if params.edits_logits or params.logprobs is not None or params.prompt_logprobs is not None:
            return False
        return task.draft is None or self.acceptance_method(task.entry.sequence).reads_draws

    def accept(self, tasks: Sequence[VerifyTask], tokens: Sequence[int]) -> list[StepOutput]:
        """Verify tasks of ``draws_suffice`` by drawn tokens ``[R]``; return one output per task, in order."""
        methods = self._methods(tasks)
        results = python_verification.verify_drawn(tasks, methods, tokens)
        return [self.output_of(task, result, NO_LOGITS) for task, result in zip(tasks, results, strict=True)]

    def _implementation(self, logits: Tensor) -> tuple[_Verify, Callable[[AcceptanceMethod], str | None]]:
        """Return the function that verifies by these logits, and the function that gives reasons against a method."""
        if self._native is not None and library.reads(logits):
            return partial(self._verify_natively, self._native), native_acceptance.supports
        if self._tensors and not logits.is_cpu:  # the logits stay on their device
            return self._verify_by_tensors, tensor.supports
        return self._verify_in_python, _no_reason

    def _verify_natively(
        self, native: NativeAcceptance, tasks: Sequence[VerifyTask], logits: Tensor
    ) -> list[VerifiedDraft]:
        return native.verify(tasks, self.acceptance_method, logits)

    def _verify_by_tensors(self, tasks: Sequence[VerifyTask], logits: Tensor) -> list[VerifiedDraft]:
        return tensor.verify_drafts(tasks, self._methods(tasks), logits)

    def _methods(self, tasks: Sequence[VerifyTask]) -> list[AcceptanceMethod]:
        return [self.acceptance_method(task.entry.sequence) for task in tasks]

    def _verify_in_python(self, tasks: Sequence[VerifyTask], logits: Tensor) -> list[VerifiedDraft]:
        return python_verification.verify_drafts(tasks, self._methods(tasks), logits)

    def _supports(self, task: VerifyTask) -> str | None:
        """Why the native library cannot verify the task's draft; None where the library can."""
        return None if task.draft is None else native_acceptance.supports(self.acceptance_method(task.entry.sequence))

    def supports_blend(self, tasks: Sequence[VerifyTask], member_logits: Sequence[Tensor]) -> bool:
        """Whether ``decide_by_blend`` can verify the tasks; pure."""
        reads = self._native is not None and all(map(library.reads, member_logits))
        return reads and all([_only_verified(task) and self._supports(task) is None for task in tasks])

    def decide_by_blend(
        self, tasks: Sequence[VerifyTask], recipe: NativeBlend, member_logits: Sequence[Tensor]
    ) -> list[StepOutput]:
        """Verify tasks of ``supports_blend``; blend ``member_logits [R, V]`` only in rows that verification reads."""
        assert self._native is not None, "``supports_blend`` was not asked"
        source = Source(member_logits, recipe)
        results = self._native.verify_by(tasks, self.acceptance_method, source)
        outputs = [self.output_of(task, result, member_logits[0]) for task, result in zip(tasks, results, strict=True)]
        return outputs if source.divergences is None else with_divergences(tasks, outputs, source.divergences)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes in the target's cache."""
        self.model.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        if self._native is not None:
            self._native.free(ids)
        self.model.free(ids)

    def _usable(self, entry: ScheduledRequest, draft: Draft | None) -> Draft | None:
        """Return the draft if its base is the known tokens and the acceptance method verifies its shape, else None."""
        if not draft or draft.base_len != entry.base_len or not entry.samples_token:
            return None
        if not can_be_verified(draft, self.model.vocab_size):
            return None
        return draft if self.acceptance_method(entry.sequence).trees or draft.is_chain else None

    def output_of(self, task: VerifyTask, result: VerifiedDraft, logits: Tensor) -> StepOutput:
        """Return the output of a verified task, with the log-probabilities that the request asks for."""
        if isinstance(result, str):
            return StepOutput(task.entry, task.draft, None, error=result)
        try:
            return self._with_logprobs(task, result, logits)
        except Exception as error:  # outputs of other requests do not depend on this request
            log.exception("the output of request %s could not be made", task.entry.sequence.id)
            return StepOutput(task.entry, task.draft, None, error=failure(error))

    def _with_logprobs(self, task: VerifyTask, result: VerifyResult, logits: Tensor) -> StepOutput:
        """Return the output of a result, with the log-probabilities that the request asks for."""
        entry, draft = task.entry, task.draft
        params = entry.sequence.request.sampling
        prompt = prompt_logprobs(task, logits) if wants_prompt_rows(entry.sequence) else ()
        if not task.count:
            return StepOutput(entry, None, None, prompt_logprobs=prompt)
        own = () if params.logprobs is None else token_logprobs(task, result, logits, params.logprobs)
        state = None
        if self.model.hidden_states is not None:
            state = self.model.hidden_states[
                task.verified_rows.start + 1 + result.path[-1] if result.path else task.verified_rows.start
            ]
        return StepOutput(entry, draft, result, own, prompt, hidden_state=state)


def with_divergences(
    tasks: Sequence[VerifyTask], outputs: Sequence[StepOutput], rows: Sequence[float]
) -> list[StepOutput]:
    """Return the outputs with the divergence of each token, from the divergences ``[R]`` of the rows of logits."""
    found = []
    for task, output in zip(tasks, outputs, strict=True):
        if output.result is not None:
            first = task.verified_rows.start
            own = (first, *(first + 1 + node for node in output.result.path))[: task.count]
            output = output._replace(divergences=tuple([rows[row] for row in own]))
        found.append(output)
    return found


def _no_reason(acceptance_method: AcceptanceMethod) -> None:
    return None


def can_be_verified(draft: Draft, vocab_size: int) -> bool:
    """Whether a draft has nodes, all in the vocabulary, each drawn with a probability above 0."""
    if not draft.tokens or min(draft.tokens) < 0 or max(draft.tokens) >= vocab_size:
        return False
    if isinstance(draft.q, DeviceProbs):
        return bool((draft.q.chosen > 0.0).all())
    return draft.q is None or all([draft.q[node, token] > 0.0 for node, token in enumerate(draft.tokens)])


def _only_verified(task: VerifyTask) -> bool:
    """Whether only verification reads the request's logits, and only masks change the logits."""
    sequence = task.entry.sequence
    needs_rows = sequence.request.sampling.logprobs is not None or wants_prompt_rows(sequence)
    return sequence.processors.only_masks and not needs_rows


def _slice_of(entry: ScheduledRequest, draft: Draft | None) -> tuple[SequenceSlice, int]:
    """Return the slice of a sequence to compute, and the number of its last rows that verification reads."""
    sequence, n, assumed = entry.sequence, entry.num_tokens, entry.assumed
    if assumed is not None:
        start, tokens, ends, first_row = assumed.end - 1, assumed.tokens[-1:], True, 0
    else:
        start, known = sequence.computed, sequence.tokens
        ends = start + n == len(known)
        first_row = 0 if wants_prompt_rows(sequence) else n - 1 if ends else n
        tokens = tuple(known[start : start + n])
    if draft is None:
        return SequenceSlice(sequence.request.id, start, tokens, (), first_row), 1 if ends else 0
    count = 1 + len(draft.tokens)
    return SequenceSlice(sequence.request.id, start, tokens + draft.tokens, draft.parents, first_row), count
