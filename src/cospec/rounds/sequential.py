"""Propose, then score and judge, one after the other (spec section 6, ``sequential``)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cospec.draws import Purpose
from cospec.protocols import Crew, Drafter, Rule
from cospec.stats import RoundInfo, RoundTimes
from cospec.types import Commit, Context, Draft, Outcome, Plan, PlanEntry


class Sequential:
    """Drafter and target take turns; each uses all of the machine."""

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
        drafts = {} if crew.drafter is None else self._draft(crew.drafter, plan)
        drafted = crew.clock()
        outcomes = None if crew.burst is None else crew.burst.verify(plan.entries, drafts)
        if outcomes is None:
            outcomes = crew.judge.verify(plan.entries, drafts)
        self.times = RoundTimes(drafted - started, crew.clock() - drafted)
        return outcomes

    def _draft(self, drafter: Drafter, plan: Plan) -> dict[str, Draft]:
        released = [entry.sequence.id for entry in plan.entries if entry.budget.release]
        if released:
            drafter.free(released)
        drafting = [entry for entry in plan.entries if entry.budget.depth > 0]
        if not drafting:
            return {}
        contexts = [context_of(entry, self.crew.judge.rule(entry.sequence)) for entry in drafting]
        proposed = drafter.propose(contexts, [entry.budget for entry in drafting])
        return {draft.id: draft for draft in self.crew.policy.trim(proposed)}

    def commit(self, commits: Seq[Commit]) -> None:
        """Target first, then the drafter."""
        self.crew.judge.commit(commits)
        if self.crew.drafter is not None:
            self.crew.drafter.commit(commits)

    def free(self, ids: Seq[str]) -> None:
        """Target first, then the drafter."""
        self.crew.judge.free(ids)
        if self.crew.burst is not None:
            self.crew.burst.free(ids)
        if self.crew.drafter is not None:
            self.crew.drafter.free(ids)


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
