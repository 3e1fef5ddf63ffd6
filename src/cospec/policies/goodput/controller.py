"""Choose the drafts with the most committed tokens per second (SmartSpec 4 to 6; CoSine equations 5 to 8).

Before a step, acceptance rates give expected tokens and the time model gives seconds; the best ratio gives the lengths.
Length 0 is a candidate: nothing is drafted, and nothing is fed to the drafter. Every running sequence takes part in
every step, unless ``choose_batch`` lets ``sequence_selection.py`` leave some out. Ties go to the older sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from pydantic import Field

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget, RequestState
from cospec.plugin_options import Options
from cospec.policies.goodput.acceptance_rates import PRIOR, AcceptanceRates, Floats, Ints
from cospec.policies.goodput.controller_states import (
    FIRST_WAIT,
    KEEP,
    LONGEST_WAIT,
    OPTIMISTIC_RATE,
    REVIEW_SECONDS,
    Assignment,
    Decision,
    Interruption,
    steps_to_next_review,
)
from cospec.policies.goodput.draft_cache_release import DraftCacheRelease
from cospec.policies.goodput.draft_shapes import grid_rows
from cospec.policies.goodput.exploration import LENGTH, PLAIN, PROBE_STEPS, TRIAL_STEPS, ExplorationBudget
from cospec.policies.goodput.length_optimizer import LengthChoice, allocate
from cospec.policies.goodput.length_problem import LengthProblem, Solve
from cospec.policies.goodput.level_rates import LevelRates
from cospec.policies.goodput.num_drafters import NumDrafters
from cospec.policies.goodput.observed_steps import ObservedSteps
from cospec.policies.goodput.sequence_selection import SequenceSelection
from cospec.policies.goodput.shape_menus import ShapeChoice
from cospec.policies.goodput.step_costs import LengthInputs, StepBounds, StepCosts
from cospec.policies.latency.step import StepLatency
from cospec.policies.policy_build_context import PolicyContext


class GoodputOptions(Options):
    """Options of ``goodput``.

    Attributes:
        per_sequence: a length for each sequence; False gives all sequences the same length.
        prior: the acceptance rate before any draft was verified.
        probe_share: share of the time that exploration may lose.
        release_above: share of recent steps without a draft above which a sequence loses its draft cache.
        max_step_seconds: longest planned step with drafts (T_max).
        max_verified_tokens: draft tokens verified in a step (Γ_max); None leaves the engine's limits.
        choose_batch: steps may leave out sequences for the sake of goodput.
        choose_drafters: the number of drafters of a pool is chosen with the lengths; False leaves it to the routing.
        per_position: acceptance rates by position of a chain, and by level of a tree; False: one rate for all.
        trees: trees of model drafters where trees yield more tokens per second than chains.
    """

    per_sequence: bool = True
    prior: float = Field(default=PRIOR, gt=0, lt=1)
    probe_share: float = Field(default=0.01, ge=0, lt=1)
    release_above: float = Field(default=0.7, gt=0, le=1)
    max_step_seconds: float | None = Field(default=None, gt=0)
    max_verified_tokens: int | None = Field(default=None, ge=0)
    choose_batch: bool = False
    choose_drafters: bool = True
    per_position: bool = False
    trees: bool = False


class Goodput(Policy):
    """The ``goodput`` policy. ``controller_states.py`` defines the states of the controller and their transitions."""

    Options: ClassVar[type[GoodputOptions]] = GoodputOptions
    needs_latency: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    keeps_drafts: ClassVar[bool] = True

    def __init__(
        self,
        options: GoodputOptions,
        context: PolicyContext,
        solve: Solve = allocate,
        every_size: bool = False,
    ) -> None:
        self.options, self.context = options, context
        self.cost = StepLatency(context.costs, context.capabilities)
        able = context.capabilities
        self.trees = options.trees and not able.trees and not able.chains
        levels = LevelRates(options.per_position, self.trees or (options.per_position and able.trees))
        self.acceptance = AcceptanceRates(options.prior, levels)
        self.draft_caches = DraftCacheRelease(options.release_above)
        self.exploration = ExplorationBudget(options.probe_share)
        self.num_drafters = NumDrafters(able.num_drafters if options.choose_drafters else 1)
        self.batch = SequenceSelection(options.max_step_seconds or float("inf"), every_size)
        bounds = StepBounds(options.max_step_seconds, options.max_verified_tokens)
        self._costs, self._groups = StepCosts(self.cost, bounds), 1
        self._shapes = ShapeChoice(context, self._costs, solve, levels, self.trees)
        self._probe_length = min(LENGTH, context.longest)
        self._observed = ObservedSteps()  # since the latest review
        self._wait = FIRST_WAIT  # maximum steps from the latest review to the next
        self._step = 0
        self._ready: list[RequestState] = []  # of the latest plan
        self._ids: list[str] = []  # of these
        self._decision = Decision()
        self._interruption: Interruption | None = None
        self._assigned = self._decision.assigned  # of the latest plan

    @classmethod
    def build(cls, options: GoodputOptions, context: PolicyContext) -> Goodput:
        """Build the policy with the context's measured costs, or with costs that the steps will teach."""
        return cls(options, context)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Return the latest decision while it is recent or nothing changed, otherwise a new decision."""
        if not load.ready:
            return []
        if load.ready != self._ready:
            self._ready, self._ids = list(load.ready), [sequence.request.id for sequence in load.ready]
        ids = self._ids
        self._step += self._observed.advance()
        if self._interruption is not None and self._interruption.ends <= self._step:
            self._interruption = None
        changed = ids is not self._decision.assigned.ids and ids != self._decision.assigned.ids
        resized = changed and self._decision.resized(len(ids))
        unforeseen = resized and len(ids) not in self._decision.by_count
        if unforeseen or self._is_late(len(ids)):
            self._review(ids, load, changed)
        elif changed:
            self._carry_over(ids, load, resized)
        self._assigned = (self._interruption or self._decision).assigned
        return self.batch.taken(ids, self._assigned.budgets)

    @property
    def horizon(self) -> int:
        """Steps until the next review, or until an interruption ends; 1 where sequences take turns."""
        if self.batch.size is not None:
            return 1
        left = self._wait - self._observed.steps
        return max(1, left if self._interruption is None else min(left, self._interruption.ends - self._step))

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts unchanged: they were made to measure."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Only store the step, which is cheap; a review learns from stored steps and may make a new decision."""
        if self._observed.add(stats, commits, self._assigned.by_id) > LONGEST_WAIT:  # the engine asks for no plans
            self._learn_rates()

    def learn(self) -> None:
        """Learn rates, draft caches and costs from all stored steps."""
        self._learn_rates()
        self.cost.learn()

    def gauges(self) -> Mapping[str, float]:
        """Return the latest decision and the prediction error of the time model, as last learned."""
        budgets = self._assigned.budgets
        return {
            "speculation_length": sum(budget.depth for budget in budgets) / max(1, len(budgets)),
            "expected_goodput": self._decision.goodput,
            "acceptance_rate": self.acceptance.overall,
            **self.cost.gauges(),
        }

    def price(self, load: BatchState) -> float:
        """Return the expected tokens that one more verified token must bring to pay, at the latest decision."""
        drafted = sum(budget.max_nodes for budget in self._assigned.budgets)
        tokens = len(load.ready) + load.other_prefill_tokens + drafted
        target = self.cost.target
        return self._decision.goodput * (target.tokens(tokens + 1) - target.tokens(tokens))

    @property
    def _problem(self) -> LengthProblem:
        """The problem with the shapes of the latest decision."""
        return self._shapes.problem

    def _learn_rates(self) -> None:
        """Pass stored steps to the acceptance rates, draft caches and costs."""
        steps = self._observed.take()
        self.acceptance.observe([(commits, budgets) for _, commits, budgets in steps])
        if self.num_drafters.most > 1:
            for _, commits, budgets in steps:
                self.num_drafters.observe(commits, budgets)
        for stats, commits, _ in steps:
            self.cost.observe(stats, self.draft_caches.observe(commits))
            self._groups = stats.groups
        self.exploration.accrue([stats for stats, _, _ in steps])

    def _review(self, ids: list[str], load: BatchState, changed: bool) -> None:
        """Learn from stored steps; make a new decision if requests, rates, costs or load changed."""
        self._learn_rates()
        self._observed.restart()
        before, moved = self._decision, self._shapes.refresh()
        if moved or changed or self._step > before.expires or self._is_old(load):
            self._decide(ids, load)
        stable = changed or self._decision.drafts_for == before.drafts_for
        self._wait = steps_to_next_review(self._wait, stable, self._decision.drafts_for)

    def _is_late(self, count: int) -> bool:
        """Whether a review of ``count`` sequences is due; turns make drafts, from which a review learns, rarer."""
        seconds, steps = self._observed.seconds, self._observed.steps
        if seconds < REVIEW_SECONDS and steps < self._wait:
            return False
        turns = self.batch.turns(count)
        return seconds >= turns * REVIEW_SECONDS or steps >= turns * self._wait

    def _is_old(self, load: BatchState) -> bool:
        decision = self._decision
        if not decision.fits(self.cost.changed, self._groups, load.other_prefill_tokens):
            return True
        return decision.drifted(self.acceptance.rates(decision.assigned.ids))

    def _carry_over(self, ids: list[str], load: BatchState, resized: bool) -> None:
        """Extend the latest decision to other requests, until the next review.

        Each request keeps its length, and new requests get the length of new requests. If the number of requests
        changed strongly, all requests get the length for the new number.
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
        backlog = None if self.context.capabilities.costless else self.draft_caches.backlog(load.ready, lengths)
        inputs = self._costs.inputs(load, lengths, backlog, self._groups)
        rates, choice, found = self._choose_num_drafters(rates, inputs)
        if self.options.choose_batch and len(ids) > 1:
            choice, found = self._choose_batch(ids, rates, choice, found, load)
        trusted = self.num_drafters.most == 1 or self.num_drafters.settled
        turns = self.batch.turns(len(ids))
        # while sequences take turns, old counts decay and no trial measures other lengths
        explored, steps = (found, 1) if turns > 1 else self._explore(rates, choice, found, inputs, load)
        budgets = self._settle(ids, found, load)
        new_request = self._for_new_request(choice, inputs, load)
        self._shapes.resize(max((budget.depth for budget in found), default=0))
        version = self.cost.changed
        before = self._decision.costs_version, self._decision.groups
        by_count = self._decision.by_count if before == (version, self._groups) else {}
        self._decision = Decision(
            assigned=Assignment.of(ids, budgets),
            count=len(ids),
            new_request=new_request,
            by_count={**by_count, len(ids): new_request},
            choice=choice,
            rates=now,
            overall_rate=self.acceptance.overall,
            groups=self._groups,
            costs_version=version,
            other_tokens=load.other_prefill_tokens,
            expires=self._step + int(turns * (KEEP if trusted else FIRST_WAIT)),
        )
        # a released draft cache counts too: the budgets report the release one step later
        interrupted = explored != budgets
        self._interruption = Interruption(Assignment.of(ids, explored), self._step + steps) if interrupted else None

    def _choose_batch(
        self, ids: list[str], rates: Floats, choice: LengthChoice, budgets: list[DraftBudget], load: BatchState
    ) -> tuple[LengthChoice, list[DraftBudget]]:
        """Return the best lengths in steps of the best size. All steps of a size have the mean context, and no backlog.

        Args:
            choice, budgets: the best lengths of a step with all sequences.
        """
        context = sum([len(sequence.tokens) for sequence in load.ready]) / len(ids)
        inputs = lru_cache(lambda size: self._costs.inputs(load, [context] * size, None, self._groups))

        def solved(places: Sequence[int]) -> tuple[LengthChoice, list[DraftBudget]]:
            return self._problem.solve(rates[list(places)], inputs(len(places)), self.options.per_sequence)

        return self.batch.choose(ids, choice, budgets, solved)

    def _settle(self, ids: list[str], budgets: list[DraftBudget], load: BatchState) -> list[DraftBudget]:
        """Record the budgets from now on; returned budgets may release draft caches."""
        if self.context.capabilities.costless:
            return budgets
        return self.draft_caches.settle(ids, budgets, self._step)

    def _explore(
        self, rates: Floats, choice: LengthChoice, budgets: list[DraftBudget], inputs: LengthInputs, load: BatchState
    ) -> tuple[list[DraftBudget], int]:
        """Return the first budgets and their number of steps: a trial length, a probe, or the decision's budgets."""
        other = self._other_length(rates, choice, inputs)
        if other is not None:
            return other, TRIAL_STEPS
        probed = self._probe(rates, choice.counts, inputs, load)
        if not probed:
            return budgets, 1
        probe = DraftBudget(depth=self._probe_length, max_nodes=self._probe_length)
        return [probe if place in probed else budget for place, budget in enumerate(budgets)], PROBE_STEPS

    def _other_length(self, rates: Floats, choice: LengthChoice, inputs: LengthInputs) -> list[DraftBudget] | None:
        """Return trial budgets, without drafts or one step shorter or longer, if a trial is due."""
        counts = choice.counts
        if not self.exploration.trial_due or not counts.any():
            return None
        rows = grid_rows(rates)
        levels = self._problem.steps(rows, inputs)
        longest = (self._problem.shapes.gains[rows] > 0).sum(axis=1)
        lengths = {
            PLAIN: np.zeros_like(counts),
            "longer": np.where(counts > 0, np.minimum(counts + 1, longest), 0),
            "shorter": np.where(counts > 1, counts - 1, counts),
        }
        outcomes = self._problem.outcomes(levels, np.stack([*lengths.values()]), inputs)
        pairs = zip(lengths.items(), outcomes, strict=True)
        others = {name: outcome for (name, other), outcome in pairs if (other != counts).any()}
        chosen = self.exploration.other(choice, others)
        if chosen is None:
            return None
        shapes, counts = self._problem.shapes.budgets, lengths[chosen]
        budgets = [shapes[row][count] for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
        return self._set_num_drafters(budgets, self.num_drafters.count)

    def _probe(self, rates: Floats, counts: Ints, inputs: LengthInputs, load: BatchState) -> Sequence[int]:
        """Return the indices of sequences to probe, although their drafts are not expected to pay."""
        if not self.exploration.due or counts.min() > 0 or not self.context.longest:
            return ()
        optimistic, _ = self._problem.per_sequence(np.where(counts == 0, OPTIMISTIC_RATE, rates), inputs)
        idle = np.flatnonzero((counts == 0) & ((optimistic.counts > 0) | self.exploration.stale))
        if not len(idle):
            return ()
        unseen = self.draft_caches.unseen([load.ready[place] for place in idle.tolist()])
        steps = PROBE_STEPS * self._probe_length * self._costs.token_cost(inputs)
        costs = self._costs.feeding(unseen) + steps
        drafted = sum(
            self._problem.shapes.sizes[row, :k].sum() for row, k in zip(grid_rows(rates), counts, strict=True)
        )
        return self.exploration.choose(
            idle, costs, self._problem.limits(inputs), int(drafted), float(rates[idle].mean())
        )

    def _for_new_request(self, choice: LengthChoice, inputs: LengthInputs, load: BatchState) -> DraftBudget:
        """Return the best common length of as many requests, all with the overall rate.

        If other requests have drafts, a new request gets a draft as well: a step of few drafts takes nearly as long as
        a step of many. If no request has a draft, the text that must be fed first counts.
        """
        fed: Floats | None = None
        if not choice.counts.any() and not self.context.capabilities.costless:
            fed = self._costs.feeding(np.full(inputs.sequences, self.draft_caches.backlog_of_new_request(load.ready)))
        budget = self._problem.uniform(self.acceptance.overall, replace(inputs, backlog=fed))[1][0]
        return self._set_num_drafters([budget], self.num_drafters.count)[0]

    def _choose_num_drafters(
        self, rates: Floats, inputs: LengthInputs
    ) -> tuple[Floats, LengthChoice, list[DraftBudget]]:
        """Return the best lengths with the best number of drafters, among the current number and its neighbours."""
        each = self.options.per_sequence
        if self.num_drafters.most == 1:
            return rates, *self._problem.choose(rates, inputs, each)
        overall, found = self.acceptance.overall, {}
        for m in self.num_drafters.nearby:
            self.cost.drafters = m
            shifted = self.num_drafters.shifted(rates, m, overall)
            found[m] = (shifted, *self._problem.choose(shifted, inputs, each))
        best = max(found, key=lambda m: (found[m][1].goodput, -m))
        self.num_drafters.count = self.cost.drafters = best
        shifted, choice, budgets = found[best]
        return shifted, choice, self._set_num_drafters(budgets, best)

    def _set_num_drafters(self, budgets: list[DraftBudget], count: int) -> list[DraftBudget]:
        """Set the number of drafters in the budgets, if there are several."""
        if self.num_drafters.most == 1:
            return budgets
        return [replace(budget, drafters=count) if budget.depth else budget for budget in budgets]
