"""Propose, then score and verify, in turn: the execution mode ``sequential``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cospec.core.interfaces import MultiStepRunner, StepContext
from cospec.core.plugins import AcceptanceMethod, Drafter
from cospec.core.rng import StreamKind
from cospec.core.stats import ExecutionInfo, StepTimes
from cospec.core.step import FinishedFuture, Future, StepResult, SubmittedStep
from cospec.core.types import (
    Commit,
    Draft,
    DraftContext,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
)
from cospec.execution.draft_errors import failed_outputs, propose_one_by_one

SHARED = "shares its forward with a readable request"
IN_FLIGHT = "the verifier takes several steps at a time"

log = logging.getLogger(__name__)


class Sequential:
    """Drafter and target take turns; each uses all of the machine."""

    learns: ClassVar[bool] = False

    def __init__(self, components: StepContext) -> None:
        self.components = components
        self.info = ExecutionInfo("sequential")

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        """One output per entry; of each step, where several are run as one.

        This is the only place that decides how a step runs: as one native call where all requests can. Otherwise all
        requests share one forward of the drafter and of the target, since a second forward for a native group costs
        more than the call saves; each draft is then verified natively where its own request can.
        """
        components = self.components
        runner, default = components.burst, components.why_no_burst
        if components.verifier.max_in_flight > 1:  # the target does not run in this thread
            runner, default = None, IN_FLIGHT
        why = {} if runner is None else runner.supports(plan)
        if runner is not None and not why:
            outputs, times = runner.run(plan.entries, plan.max_steps)
            return SubmittedStep(plan.entries, FinishedFuture(outputs), times, why)
        default = default if runner is None else SHARED
        readable = {entry.sequence.id: why.get(entry.sequence.id, default) for entry in plan.entries}
        return self._submit_readably(plan.entries, runner, readable)

    def _submit_readably(
        self, entries: Sequence[ScheduledRequest], runner: MultiStepRunner | None, readable: Mapping[str, str]
    ) -> SubmittedStep:
        """Draft, then submit; the native library may still verify what it did not draft."""
        components, started = self.components, self.components.clock()
        drafts, failures = ({}, {}) if components.drafter is None else self._draft(components.drafter, entries)
        drafted = components.clock()
        sound = [entry for entry in entries if entry.sequence.id not in failures] if failures else entries
        future: Future[list[StepOutput]]
        if not sound:
            future = FinishedFuture([])
        elif runner is not None and not runner.supports_drafts(sound, drafts):
            future = FinishedFuture(runner.verify(sound, drafts))
        else:
            future = components.verifier.submit(sound, drafts)
        times = StepTimes(drafted - started, components.clock() - drafted)
        return SubmittedStep(entries, future, times, readable, failed_outputs(entries, failures) if failures else ())

    def collect(self, step: SubmittedStep) -> StepResult:
        """Wait for a submitted step."""
        return step.collect(self.components.clock)

    def _draft(self, drafter: Drafter, entries: Sequence[ScheduledRequest]) -> tuple[dict[str, Draft], dict[str, str]]:
        """Drafts, and why requests could not be drafted for, by sequence."""
        released = [entry.sequence.id for entry in entries if entry.budget.release]
        if released:
            drafter.free(released)
        drafting = [entry for entry in entries if entry.budget.depth > 0]
        if not drafting:
            return {}, {}
        contexts = [context_of(entry, self.components.verifier.acceptance_method(entry.sequence)) for entry in drafting]
        budgets, failures = [entry.budget for entry in drafting], dict[str, str]()
        try:
            proposed = drafter.propose(contexts, budgets)
        except Exception:  # which request raised is not known yet

            def call(method: str, *args: Any) -> Any:
                return getattr(drafter, method)(*args)

            log.exception("a batch could not be drafted for; its requests are tried one by one")
            proposed, failures = propose_one_by_one(call, contexts, budgets)
        return {draft.id: draft for draft in self.components.policy.trim(proposed)}, failures

    def commit(self, commits: Sequence[Commit]) -> None:
        """Target first, then the drafter."""
        self.components.verifier.commit(commits)
        if self.components.drafter is not None:
            try:
                self.components.drafter.commit(commits)
            except Exception:
                log.exception("the drafter forgets %d requests", len(commits))
                self.components.drafter.free([commit.id for commit in commits])

    def free(self, ids: Sequence[str]) -> None:
        """Target first, then the drafter."""
        self.components.verifier.free(ids)
        if self.components.burst is not None:
            self.components.burst.free(ids)
        if self.components.drafter is not None:
            self.components.drafter.free(ids)

    def close(self) -> None:
        """Do nothing: the drafter works only during ``submit``."""


def context_of(entry: ScheduledRequest, acceptance_method: AcceptanceMethod) -> DraftContext:
    """What a drafter sees of a planned sequence."""
    sequence = entry.sequence
    request = sequence.request
    stream_kind: StreamKind = acceptance_method.stream_kind
    return DraftContext(
        sequence.id,
        sequence.tokens,
        sequence.prompt_len,
        request.sampling,
        request.seed,
        stream_kind,
        drafters=request.speculation.drafters,
        processors=sequence.processors,
    )
