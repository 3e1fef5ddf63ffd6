"""Propose, then score and verify, in turn: the execution mode ``sequential``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cospec.core.interfaces import StepContext
from cospec.core.plugins import AcceptanceMethod
from cospec.core.rng import StreamKind
from cospec.core.stats import ExecutionInfo, StepTimes
from cospec.core.types import (
    Commit,
    Draft,
    DraftContext,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
)
from cospec.execution.draft_errors import propose_one_by_one, with_failures

log = logging.getLogger(__name__)


class Sequential:
    """Drafter and target take turns; each uses all of the machine."""

    learns: ClassVar[bool] = False

    def __init__(self, components: StepContext) -> None:
        self.components = components
        self.times, self.info = StepTimes(), ExecutionInfo("sequential")
        self.readable: Mapping[str, str] = {}

    def run(self, plan: SchedulerOutput) -> list[StepOutput]:
        """Return one output per entry; of each step, where several run as one call.

        This is the only place that decides how a step runs. The multi-step call runs every step of a native target. The
        drafter drafts for the requests that the call cannot draft for. One forward of the target serves all requests.
        """
        components, runner, started = self.components, self.components.multi_step, self.components.clock()
        ids = [entry.sequence.id for entry in plan.entries]
        self.readable = dict.fromkeys(ids, components.why_no_multi_step) if runner is None else runner.supports(plan)
        self._release(plan.entries)
        asked = [entry for entry in plan.entries if entry.budget.depth and entry.sequence.id in self.readable]
        drafts, failures = self._draft(asked)
        sound = [entry for entry in plan.entries if entry.sequence.id not in failures] if failures else plan.entries
        drafted = components.clock()
        drafting, outputs = drafted - started, list[StepOutput]()
        if runner is None:
            outputs = components.verifier.verify(sound, drafts) if sound else []
            self.times = StepTimes(drafting, components.clock() - drafted)
        elif sound:
            given = {entry.sequence.id: drafts.get(entry.sequence.id) for entry in asked}
            outputs, times = runner.run(sound, plan.rounds, given)
            self.times = replace(times, draft=times.draft + drafting) if given else times
        else:
            self.times = StepTimes(drafting)
        return with_failures(plan.entries, outputs, failures) if failures else outputs

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
        contexts = [context_of(entry, self.components.verifier.acceptance_method(entry.sequence)) for entry in drafting]
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
        """Nothing runs between two steps."""


def context_of(entry: ScheduledRequest, acceptance_method: AcceptanceMethod) -> DraftContext:
    """Return what a drafter reads of a planned sequence."""
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
    )
