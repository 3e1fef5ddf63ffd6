"""Propose, then score and verify, in turn: the execution mode ``sequential``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from cospec.core.interfaces import ModeComponents, MultiStepRunner, WindowsAhead
from cospec.core.plugin_base import context_of
from cospec.core.stats import ExecutionInfo, StepTimes
from cospec.core.submitted_step import CancellableFuture, FinishedFuture, StepResult, SubmittedStep
from cospec.core.types import (
    Commit,
    Draft,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
)
from cospec.execution.draft_errors import failed_outputs, propose_one_by_one

IN_FLIGHT = "the verifier takes several steps at a time"

log = logging.getLogger(__name__)


class Sequential:
    """Drafter and target take turns; each uses all of the machine."""

    learns: ClassVar[bool] = False
    windows_ahead: WindowsAhead | None = None

    def __init__(self, components: ModeComponents) -> None:
        self.components = components
        self.info = ExecutionInfo("sequential")

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        """Return one output per entry; of each step, where several run as one call.

        The multi-step call runs every step of a native target. The drafter drafts for the requests that the call cannot
        draft for. One forward of the target serves all requests. The overlapped modes draft elsewhere and verify in
        Python; ``ensemble/native_steps.py`` decides for ensembles.
        """
        components, runner, started = self.components, self.components.multi_step, self.components.clock()
        reason = components.why_no_multi_step
        if components.verifier.max_in_flight > 1:  # the target does not run in this thread
            runner, reason = None, IN_FLIGHT
        ids, scored = [entry.sequence.id for entry in plan.entries], self._scoring_seconds
        self._release(plan.entries)
        if runner is None:
            python_path = dict.fromkeys(ids, reason)
        else:
            self._prepare(runner, plan)
            python_path = runner.supports(plan)
        asked = [entry for entry in plan.entries if entry.budget.depth and entry.sequence.id in python_path]
        drafts, failures = self._draft(asked)
        scoring = self._scoring_seconds - scored
        sound = [entry for entry in plan.entries if entry.sequence.id not in failures] if failures else plan.entries
        drafted = components.clock()
        drafting = drafted - started
        future: CancellableFuture[list[StepOutput]] = FinishedFuture([])
        if runner is not None and sound:
            given = {entry.sequence.id: drafts.get(entry.sequence.id) for entry in asked}
            outputs, times = runner.run(sound, plan.max_steps, given)
            future = FinishedFuture(outputs)
            if given or scoring:
                times = StepTimes(times.draft + drafting, times.target, times.each, scoring)
        else:
            future = components.verifier.submit(sound, drafts) if sound else future
            times = StepTimes(drafting, components.clock() - drafted, scoring=scoring)
        return SubmittedStep(
            plan.entries, future, times, python_path, failed_outputs(plan.entries, failures) if failures else ()
        )

    def collect(self, step: SubmittedStep) -> StepResult:
        """Wait for a submitted step."""
        return step.collect(self.components.clock)

    @property
    def _scoring_seconds(self) -> float:
        drafter = self.components.drafter
        return 0.0 if drafter is None else drafter.scoring_seconds

    def _prepare(self, runner: MultiStepRunner, plan: SchedulerOutput) -> None:
        """Let a pool score known tokens; drafts are possible without scores."""
        try:
            runner.prepare(plan)
        except Exception:
            log.exception("known tokens could not be scored")

    def _release(self, entries: Sequence[ScheduledRequest]) -> None:
        """Have the drafter forget the requests whose budgets say so."""
        released = [entry.sequence.id for entry in entries if entry.budget.release]
        if released and self.components.drafter is not None:
            self.components.drafter.free(released)

    def _draft(self, drafting: Sequence[ScheduledRequest]) -> tuple[dict[str, Draft], dict[str, str]]:
        """Return drafts, and why requests could not be drafted for, by id."""
        drafter = self.components.drafter
        if not drafting or drafter is None:
            return {}, {}
        method_of = self.components.verifier.acceptance_method
        contexts = [context_of(entry.sequence, method_of(entry.sequence).stream_kind) for entry in drafting]
        budgets, failures = [entry.budget for entry in drafting], dict[str, str]()
        try:
            proposed = drafter.propose(contexts, budgets)
        except Exception:  # the request that raised is not known yet

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
        if self.components.multi_step is not None:
            self.components.multi_step.free(ids)
        if self.components.drafter is not None:
            self.components.drafter.free(ids)

    def close(self) -> None:
        """Do nothing: the drafter works only during ``submit``."""
