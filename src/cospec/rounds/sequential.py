"""Propose, then score and judge, one after the other (spec section 6, ``sequential``)."""

from __future__ import annotations

import time

from cospec.draws import Purpose
from cospec.protocols import Drafter, Judge, Rule
from cospec.types import Context, Outcome, Plan, PlanEntry, RoundTimes


class Sequential:
    """Drafter and target take turns; each uses all of the machine."""

    def __init__(self, drafter: Drafter | None, verifier: Judge) -> None:
        self.drafter, self.verifier = drafter, verifier
        self.times = RoundTimes()

    def run(self, plan: Plan) -> list[Outcome]:
        """One outcome per entry, in order."""
        started = time.perf_counter()
        drafting = [entry for entry in plan.entries if entry.budget.depth > 0]
        drafts = {}
        if self.drafter is not None and drafting:
            contexts = [context_of(entry, self.verifier.rule(entry.sequence)) for entry in drafting]
            budgets = [entry.budget for entry in drafting]
            drafts = {draft.id: draft for draft in self.drafter.propose(contexts, budgets)}
        drafted = time.perf_counter()
        outcomes = self.verifier.verify(plan.entries, drafts)
        self.times = RoundTimes(drafted - started, time.perf_counter() - drafted)
        return outcomes


def context_of(entry: PlanEntry, rule: Rule) -> Context:
    """What a drafter sees of a planned sequence."""
    sequence = entry.sequence
    request = sequence.request
    noise: Purpose = rule.noise
    return Context(sequence.id, sequence.tokens, sequence.prompt_len, request.sampling, request.seed, noise)
