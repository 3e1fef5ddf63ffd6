"""The speculation that brings the most committed tokens per second (SmartSpec 4 to 6; CoSine equations 5 to 8).

Before a round: expected tokens from acceptance rates, seconds from the time model, and the lengths that make the best
ratio. Length 0 is one of them: nothing is drafted, and nothing fed to the drafter. Every running sequence takes part in
every round, so the prefix of the queue that is served is the scheduler's; ties between sequences go to the older one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from cospec.core.plugins import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.options import Options
from cospec.policies.context import PolicyContext
from cospec.policies.goodput.acceptance_rates import PRIOR, AcceptanceRates, Floats, Ints
from cospec.policies.goodput.decision import (
    FIRST_WAIT,
    KEEP,
    LONGEST_WAIT,
    LOOK_SECONDS,
    OPTIMISTIC_RATE,
    Assignment,
    Decision,
    Interruption,
    steps_to_next_look,
)
from cospec.policies.goodput.draft_cache_tracker import DraftCacheTracker
from cospec.policies.goodput.draft_shapes import chains, trees
from cospec.policies.goodput.exploration import IN_A_ROW, LENGTH, PLAIN, ROUNDS, ExplorationBudget
from cospec.policies.goodput.length_optimizer import DraftLevels, LengthChoice, StepLimits, allocate
from cospec.policies.goodput.length_problem import LengthInputs, LengthProblem, StepBounds
from cospec.policies.goodput.num_drafters import NumDrafters
from cospec.policies.goodput.split_steps import ObservedSteps
from cospec.policies.latency.step import StepLatency

Solver = Callable[[Floats, LengthInputs], tuple[LengthChoice, list[DraftBudget]]]


class GoodputOptions(Options):
    """What may be set.

    Attributes:
        per_sequence: a length for each sequence; False gives all the same one.
        prior: the acceptance rate that is assumed before any draft was judged.
        probe_share: share of the time that may be lost on drafts that only tell whether drafting would pay.
        release_above: share of recent rounds without a draft above which a sequence loses its draft cache.
        max_round_seconds: rounds are planned no longer than that with drafts (T_max).
        max_verified_tokens: draft tokens verified in a round (Γ_max); None is what the engine's limits leave.
    """

    per_sequence: bool = True
    prior: float = Field(default=PRIOR, gt=0, lt=1)
    probe_share: float = Field(default=0.01, ge=0, lt=1)
    release_above: float = Field(default=0.7, gt=0, le=1)
    max_round_seconds: float | None = Field(default=None, gt=0)
    max_verified_tokens: int | None = Field(default=None, ge=0)


class Goodput(Policy):
    """Spec section 5, ``goodput``. The states of the controller, and how they change, are in ``decision.py``."""

    Options: ClassVar[type[GoodputOptions]] = GoodputOptions
    needs_latency: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    keeps_drafts: ClassVar[bool] = True

    def __init__(
        self,
        options: GoodputOptions,
        setting: PolicyContext,
        solve: Callable[[DraftLevels, StepLimits], LengthChoice] = allocate,
    ) -> None:
        self.options, self.setting = options, setting
        self.cost = StepLatency(setting.costs, setting.capabilities)
        self.acceptance = AcceptanceRates(options.prior)
        self.draft_caches = DraftCacheTracker(options.release_above)
        self.exploration = ExplorationBudget(options.probe_share)
        self.members = NumDrafters(setting.capabilities.members)
        bounds = StepBounds(options.max_round_seconds, options.max_verified_tokens)
        shapes = trees(setting.longest) if setting.capabilities.trees else chains(setting.longest)
        self._problem = LengthProblem(shapes, self.cost, bounds, solve)
        self._probe_length = min(LENGTH, setting.longest)
        self._observed = ObservedSteps()  # since the latest look
        self._wait = FIRST_WAIT  # steps from the latest look to the next, at most
        self._step = 0
        self._decision = Decision()
        self._interruption: Interruption | None = None

    @classmethod
    def build(cls, options: GoodputOptions, setting: PolicyContext) -> Goodput:
        """With the measured costs of the setting, or ones that the rounds will teach."""
        return cls(options, setting)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """The latest decision while it is young or nothing moved, a new one otherwise."""
        if not load.ready:
            return []
        ids = [sequence.request.id for sequence in load.ready]
        passed = self._observed.advance()
        self._step += passed
        self.draft_caches.tick(passed)
        if self._interruption is not None and self._interruption.ends <= self._step:
            self._interruption = None
        changed = ids != self._decision.assigned.ids
        resized = changed and self._decision.resized(len(ids))
        unforeseen = resized and len(ids) not in self._decision.by_count
        if unforeseen or self._observed.seconds >= LOOK_SECONDS or self._observed.steps >= self._wait:
            self._look(ids, load, changed)
        elif changed:
            self._carry_over(ids, load, resized)
        return self._assigned.budgets

    @property
    def horizon(self) -> int:
        """Until the next look, or until the decision returns after an interruption."""
        left = self._wait - self._observed.steps
        return max(1, left if self._interruption is None else min(left, self._interruption.ends - self._step))

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """All of every draft: it was made to measure."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Only note the steps, which costs next to nothing; a look learns from them, and may make a new decision."""
        if self._observed.add(stats, commits, self._assigned.by_id) > LONGEST_WAIT:  # no plans are asked for
            self._learn_rates()

    def learn(self) -> None:
        """Learn from all that was observed: rates, draft caches, costs."""
        self._learn_rates()
        self.cost.learn()

    def gauges(self) -> Mapping[str, float]:
        """The latest decision and how well the time model predicts, as far as was learned."""
        budgets = self._assigned.budgets
        return {
            "speculation_length": sum(budget.depth for budget in budgets) / max(1, len(budgets)),
            "expected_goodput": self._decision.goodput,
            "acceptance_rate": self.acceptance.overall,
            **self.cost.gauges(),
        }

    def price(self, load: BatchState) -> float:
        """Expected tokens that one more verified token has to bring to pay, at the latest decision."""
        tokens = len(load.ready) + load.catching_up + sum(budget.max_nodes for budget in self._assigned.budgets)
        target = self.cost.target
        return self._decision.goodput * (target.tokens(tokens + 1) - target.tokens(tokens))

    @property
    def _assigned(self) -> Assignment:
        """Of the latest plan."""
        return (self._interruption or self._decision).assigned

    def _learn_rates(self) -> None:
        """Judgements of the observed steps to the rates, times to the costs, which learn from them in time."""
        steps = self._observed.take()
        self.acceptance.observe([(commits, budgets) for _, commits, budgets in steps])
        for stats, commits, budgets in steps:
            if self.members.most > 1:
                self.members.observe(commits, budgets)
            self.cost.observe(stats, self.draft_caches.observe(commits))
            self.exploration.accrue(stats.total, stats.depth > 0)

    def _look(self, ids: list[str], load: BatchState, changed: bool) -> None:
        """Learn from what was observed, and decide anew where requests, rates, costs or load moved."""
        self._learn_rates()
        self._observed.restart()
        before = self._decision
        if changed or self._step > before.expires or self._is_old(load):
            self._decide(ids, load)
        quiet = changed or self._decision.drafts_for == before.drafts_for
        self._wait = steps_to_next_look(self._wait, quiet, self._decision.drafts_for)

    def _is_old(self, load: BatchState) -> bool:
        decision = self._decision
        if not decision.fits(self.cost.changed, load.catching_up):
            return True
        return decision.drifted(self.acceptance.rates(decision.assigned.ids))

    def _carry_over(self, ids: list[str], load: BatchState, resized: bool) -> None:
        """The latest decision for other requests than it was made for, until the next look.

        Each request keeps its length and new ones get theirs. Where the number of requests is another altogether, all
        get what suits that number.
        """
        decision, interruption = self._decision, self._interruption
        if not resized and interruption is None and not decision.drafts:
            self._decision = decision.without_drafts(ids)
            return
        budgets = [decision.by_count[len(ids)]] * len(ids) if resized else decision.inherited(ids)
        budgets = self._settle(ids, budgets, load)
        self._decision = decision.reassigned(ids, budgets, len(ids) if resized else decision.count, self._step)
        self._interruption = None if resized or interruption is None else interruption.inherited(ids, budgets)

    def _decide(self, ids: list[str], load: BatchState) -> None:
        rates = self.acceptance.rates(ids)
        if not self.options.per_sequence:
            rates = np.full(len(ids), self.acceptance.overall)
        now = rates
        lengths = [len(sequence.tokens) for sequence in load.ready]
        backlog = None if self.setting.capabilities.free else self.draft_caches.backlog(load.ready, lengths)
        situation = self._problem.situation(load, lengths, backlog)
        solve = self._problem.each if self.options.per_sequence else self._problem.alike
        rates, choice, found = self._with_members(rates, situation, solve)
        trusted = self.members.most == 1 or self.members.settled
        explored, steps = self._explore(rates, choice, found, situation, load)
        budgets = self._settle(ids, found, load)
        new_request = self._for_new_request(choice, situation, load)
        version = self.cost.changed
        by_count = self._decision.by_count if self._decision.costs_version == version else {}
        self._decision = Decision(
            assigned=Assignment.of(ids, budgets),
            count=len(ids),
            new_request=new_request,
            by_count={**by_count, len(ids): new_request},
            choice=choice,
            rates=now,
            overall_rate=self.acceptance.overall,
            costs_version=version,
            other_tokens=load.catching_up,
            expires=self._step + (KEEP if trusted else FIRST_WAIT),
        )
        interrupted = explored != budgets  # also where a draft cache is released: that is told one step later
        self._interruption = Interruption(Assignment.of(ids, explored), self._step + steps) if interrupted else None

    def _settle(self, ids: list[str], budgets: list[DraftBudget], load: BatchState) -> list[DraftBudget]:
        """Note who has drafts from now on; the budgets, of which some may release their draft caches."""
        if self.setting.capabilities.free:
            return budgets
        return self.draft_caches.settle(ids, budgets, [len(sequence.tokens) for sequence in load.ready])

    def _explore(
        self, rates: Floats, choice: LengthChoice, budgets: list[DraftBudget], situation: LengthInputs, load: BatchState
    ) -> tuple[list[DraftBudget], int]:
        """Budgets to run before the decision's, and for how many steps: other lengths, probes, or the decision's."""
        other = self._other_length(rates, choice, situation)
        if other is not None:
            return other, IN_A_ROW
        probed = self._probe(rates, choice.counts, situation, load)
        if not probed:
            return budgets, 1
        probe = DraftBudget(depth=self._probe_length, max_nodes=self._probe_length)
        return [probe if place in probed else budget for place, budget in enumerate(budgets)], ROUNDS

    def _other_length(self, rates: Floats, choice: LengthChoice, situation: LengthInputs) -> list[DraftBudget] | None:
        """Budgets without drafts, or with drafts one step shorter or longer, where it is time to look at those."""
        counts = choice.counts
        if not counts.any() or not self.exploration.other_due:
            return None
        longest = (self._problem.shapes.gains[self._problem.shapes.rows(rates)] > 0).sum(axis=1)
        lengths = {
            PLAIN: np.zeros_like(counts),
            "longer": np.where(counts > 0, np.minimum(counts + 1, longest), 0),
            "shorter": np.where(counts > 1, counts - 1, counts),
        }
        lengths = {name: other for name, other in lengths.items() if (other != counts).any()}
        others = {name: self._problem.outcome(rates, other, situation) for name, other in lengths.items()}
        chosen = self.exploration.other(choice, others)
        if chosen is None:
            return None
        shapes, rows = self._problem.shapes.budgets, self._problem.shapes.rows(rates).tolist()
        budgets = [shapes[row][count] for row, count in zip(rows, lengths[chosen].tolist(), strict=True)]
        return self._by_members(budgets, self.members.count)

    def _probe(self, rates: Floats, counts: Ints, situation: LengthInputs, load: BatchState) -> Sequence[int]:
        """Who is drafted for, although that is not expected to pay."""
        if not self.exploration.due or counts.min() > 0 or not self.setting.longest:
            return ()
        hopeful, _ = self._problem.each(np.where(counts == 0, OPTIMISTIC_RATE, rates), situation)
        idle = np.flatnonzero((counts == 0) & ((hopeful.counts > 0) | self.exploration.forgotten))
        if not len(idle):
            return ()
        behind = self.draft_caches.behind([load.ready[place] for place in idle.tolist()])
        steps = ROUNDS * self._probe_length * self._problem.token_cost(situation)
        costs = self._problem.feeding(behind) + steps
        drafted = sum(
            self._problem.shapes.sizes[row, :k].sum()
            for row, k in zip(self._problem.shapes.rows(rates), counts, strict=True)
        )
        return self.exploration.choose(
            idle, costs, self._problem.round(situation), int(drafted), float(rates[idle].mean())
        )

    def _for_new_request(self, choice: LengthChoice, situation: LengthInputs, load: BatchState) -> DraftBudget:
        """The best single length for as many requests, all with everybody's rate.

        Where others have drafts a new request has one too: a round of few drafts takes nearly as long as one of many.
        Where no request has a draft, the text that has to be fed first counts.
        """
        rates, backlog = np.full(situation.sequences, self.acceptance.overall), None
        if not choice.counts.any() and not self.setting.capabilities.free:
            backlog = self._problem.feeding(np.full(situation.sequences, self.draft_caches.to_begin(load.ready)))
        budget = self._problem.alike(rates, replace(situation, backlog=backlog))[1][0]
        return self._by_members([budget], self.members.count)[0]

    def _with_members(
        self, rates: Floats, situation: LengthInputs, solve: Solver
    ) -> tuple[Floats, LengthChoice, list[DraftBudget]]:
        """The best lengths with the best number of drafters among the present one and its neighbours."""
        if self.members.most == 1:
            return rates, *solve(rates, situation)
        overall, found = self.acceptance.overall, {}
        for m in self.members.nearby:
            self.cost.drafters = m
            shifted = self.members.shifted(rates, m, overall)
            found[m] = (shifted, *solve(shifted, situation))
        best = max(found, key=lambda m: (found[m][1].goodput, -m))
        self.members.count = self.cost.drafters = best
        shifted, choice, budgets = found[best]
        return shifted, choice, self._by_members(budgets, best)

    def _by_members(self, budgets: list[DraftBudget], count: int) -> list[DraftBudget]:
        """The budgets, with the number of drafters where there are several."""
        if self.members.most == 1:
            return budgets
        return [replace(budget, drafters=count) if budget.depth else budget for budget in budgets]
