"""Propose, then score and judge, one after the other (spec section 6, ``sequential``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Any, ClassVar

from cospec.draws import Purpose
from cospec.plugins import Drafter, Rule
from cospec.protocols import Crew
from cospec.rounds.asking import ask_one_by_one, with_failures
from cospec.stats import RoundInfo, RoundTimes
from cospec.types import Commit, Context, Draft, Outcome, Plan, PlanEntry

log = logging.getLogger(__name__)


class Sequential:
    """Drafter and target take turns; each uses all of the machine."""

    learns: ClassVar[bool] = False

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.times, self.info = RoundTimes(), RoundInfo("sequential")

    def run(self, plan: Plan) -> list[Outcome]:
        """One outcome per entry, in order; of each round, where several are run as one."""
        crew = self.crew
        done = None if crew.burst is None else crew.burst.run(plan)
        if done is not None:
            found, self.times = done
            return found
        started = crew.clock()
        drafts, failures = ({}, {}) if crew.drafter is None else self._draft(crew.drafter, plan)
        drafted = crew.clock()
        entries = [entry for entry in plan.entries if entry.sequence.id not in failures] if failures else plan.entries
        outcomes = None if crew.burst is None else crew.burst.verify(entries, drafts)
        if outcomes is None:
            outcomes = crew.judge.verify(entries, drafts) if entries else []
        self.times = RoundTimes(drafted - started, crew.clock() - drafted)
        return with_failures(plan.entries, outcomes, failures) if failures else outcomes

    def _draft(self, drafter: Drafter, plan: Plan) -> tuple[dict[str, Draft], dict[str, str]]:
        """Drafts, and why requests could not be drafted for, by sequence."""
        released = [entry.sequence.id for entry in plan.entries if entry.budget.release]
        if released:
            drafter.free(released)
        drafting = [entry for entry in plan.entries if entry.budget.depth > 0]
        if not drafting:
            return {}, {}
        contexts = [context_of(entry, self.crew.judge.rule(entry.sequence)) for entry in drafting]
        budgets, failures = [entry.budget for entry in drafting], dict[str, str]()
        try:
            proposed = drafter.propose(contexts, budgets)
        except Exception:  # which request raised is not known yet

            def call(method: str, *args: Any) -> Any:
                return getattr(drafter, method)(*args)

            log.exception("a batch could not be drafted for; its requests are tried one by one")
            proposed, failures = ask_one_by_one(call, contexts, budgets)
        return {draft.id: draft for draft in self.crew.policy.trim(proposed)}, failures

    def commit(self, commits: Seq[Commit]) -> None:
        """Target first, then the drafter."""
        self.crew.judge.commit(commits)
        if self.crew.drafter is not None:
            try:
                self.crew.drafter.commit(commits)
            except Exception:
                log.exception("the drafter forgets %d requests", len(commits))
                self.crew.drafter.free([commit.id for commit in commits])

    def free(self, ids: Seq[str]) -> None:
        """Target first, then the drafter."""
        self.crew.judge.free(ids)
        if self.crew.burst is not None:
            self.crew.burst.free(ids)
        if self.crew.drafter is not None:
            self.crew.drafter.free(ids)

    def close(self) -> None:
        """Nothing is at work between two rounds."""


def context_of(entry: PlanEntry, rule: Rule) -> Context:
    """What a drafter sees of a planned sequence."""
    sequence = entry.sequence
    request = sequence.request
    noise: Purpose = rule.noise
    return Context(
        sequence.id,
        sequence.tokens,
        sequence.prompt_len,
        request.sampling,
        request.seed,
        noise,
        drafters=request.speculation.drafters,
    )
