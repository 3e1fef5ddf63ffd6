"""The speculation that brings the most committed tokens per second (SmartSpec 4 to 6; CoSine equations 5 to 8).

Before a round: expected tokens from acceptance rates, seconds from the time model, and the lengths that make the best
ratio. Length 0 is one of them: nothing is drafted, and nothing fed to the drafter. Every running sequence takes part in
every round, so the prefix of the queue that is served is the scheduler's; ties between sequences go to the older one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from cospec.options import Options
from cospec.policies.acceptance import PRIOR, Acceptance, Floats, Ints
from cospec.policies.allocation import Choice, Round, Steps, allocate
from cospec.policies.apart import apart
from cospec.policies.members import Members
from cospec.policies.menu import chains, trees
from cospec.policies.probing import IN_A_ROW, LENGTH, PLAIN, ROUNDS, Probes
from cospec.policies.problem import Bounds, Problem, Situation
from cospec.policies.residents import Residents
from cospec.policies.round_cost import RoundCost
from cospec.policies.setting import PolicySetting
from cospec.stats import RoundStats
from cospec.types import Budget, Commit, Draft, Load

Solver = Callable[[Floats, Situation], tuple[Choice, list[Budget]]]

NOTHING = Budget()
OPTIMISTIC = 0.9  # a probe is worth its cost where such a rate would make drafts pay
DRIFT = 0.04  # root mean square change of the rates that makes a decision old
SUDDEN = 1.5  # times as many sequences as lengths were chosen for, or as few: chosen anew at once
LOOK = 0.25  # seconds of rounds between two looks at what was observed, which a decision may follow
SOON, KEEP, LATE = 4, 64, 256  # rounds between two looks at most: at first, later, and where all or none have drafts


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


class Goodput:
    """Spec section 5, ``goodput``."""

    Options: ClassVar[type[GoodputOptions]] = GoodputOptions
    reads_costs: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    keeps_drafts: ClassVar[bool] = True

    def __init__(
        self, options: GoodputOptions, setting: PolicySetting, solve: Callable[[Steps, Round], Choice] = allocate
    ) -> None:
        self.options, self.setting = options, setting
        self.cost = RoundCost(setting.costs, setting.offer)
        self.acceptance = Acceptance(options.prior)
        self.residents = Residents(options.release_above)
        self.probes = Probes(options.probe_share)
        self.members = Members(setting.offer.members)
        bounds = Bounds(options.max_round_seconds, options.max_verified_tokens)
        menu = trees(setting.longest) if setting.offer.trees else chains(setting.longest)
        self._problem = Problem(menu, self.cost, bounds, solve)
        self._probe_length = min(LENGTH, setting.longest)
        self._ids: list[str] = []
        self._count = 0  # sequences that the lengths were chosen for
        self._rates: Floats | float = 0.0  # that the decision was made with
        self._everybody = 0.0  # the rate that it was made with for one of which nothing is known
        self._budgets: list[Budget] = []
        self._given: dict[str, Budget] = {}
        self._usual: dict[int, Budget] = {}  # for a sequence of which nothing is known, by the number of them
        self._newest = NOTHING  # the usual one of the latest decision
        self._choice: Choice | None = None
        self._made = (-1, 0)  # the costs and the other tokens that the decision was made with
        self._age = 0  # rounds since the decision
        self._patience = SOON  # rounds to the next look
        self._since = 0.0  # seconds of rounds since what was observed was learned from
        self._seen: list[tuple[RoundStats, Seq[Commit], Mapping[str, Budget]]] = []
        self._unread = 0  # rounds that these are
        self._passed = 1  # rounds since the latest plan was asked for
        self._decided: tuple[list[Budget], dict[str, Budget]] | None = None  # what is interrupted
        self._brief = 0  # for so many rounds

    @classmethod
    def build(cls, options: GoodputOptions, setting: PolicySetting) -> Goodput:
        """With the measured costs of the setting, or ones that the rounds will teach."""
        return cls(options, setting)

    def plan(self, load: Load) -> list[Budget]:
        """The latest decision while it is young or nothing moved, a new one otherwise."""
        if not load.ready:
            return []
        ids = [sequence.request.id for sequence in load.ready]
        changed, count = ids != self._ids, self._count
        self._brief -= self._passed
        if self._decided is not None and self._brief <= 0:
            self._budgets, self._given = self._decided
            self._decided = None
        self._age += self._passed
        self.residents.tick(self._passed)
        self._passed = 1
        sudden = changed and not len(ids) < SUDDEN * count < SUDDEN**2 * len(ids)
        if (sudden and len(ids) not in self._usual) or self._since >= LOOK or self._unread >= self._patience:
            self.learn()
            self._unread, self._since, before = 0, 0.0, self._kind
            if changed or self._age > KEEP or self._is_old(load):
                self._ids = ids
                self._decide(self.acceptance.rates(ids), load)
            patience = self._patience + SOON if changed or self._kind == before else SOON
            self._patience = min(patience, KEEP if self._kind is None else LATE)
        elif changed:
            self._carry_over(ids, load, sudden)
        return self._budgets

    @property
    def lasts(self) -> int:
        """Until the next look, or until what is interrupted goes on."""
        left = self._patience - self._unread
        return max(1, left if self._decided is None else min(left, self._brief))

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """All of every draft: it was made to measure."""
        return drafts

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Only note the round, so that it costs next to nothing: ``learn`` is called when a decision may be due."""
        self._seen.append((stats, commits, self._given))
        self._since += stats.total
        self._passed = stats.times.rounds
        self._unread += self._passed
        if len(self._seen) > LATE:  # nobody asks for plans
            self.learn()

    def learn(self) -> None:
        """Judgements of the rounds that were observed to the rates, times to the costs."""
        seen = [(*each, given) for stats, commits, given in self._seen for each in apart(stats, commits)]
        self._seen = []
        self.acceptance.observe([(commits, given) for _, commits, given in seen])
        for stats, commits, given in seen:
            if self.members.most > 1:
                self.members.observe(commits, given)
            self.cost.observe(stats, self.residents.observe(commits))
            self.probes.accrue(stats.total, stats.depth > 0)

    def gauges(self) -> Mapping[str, float]:
        """The latest decision and how well the time model predicts."""
        self.learn()
        length = sum(budget.depth for budget in self._budgets) / max(1, len(self._budgets))
        expected = self._choice.goodput if self._choice else 0.0
        rate = self.acceptance.everybody
        return {"speculation_length": length, "expected_goodput": expected, "acceptance_rate": rate} | dict(
            self.cost.gauges()
        )

    def price(self, load: Load) -> float:
        """Expected tokens that one more verified token has to bring to pay, at the latest decision."""
        tokens = len(load.ready) + load.catching_up + sum(budget.max_nodes for budget in self._budgets)
        target = self.cost.target
        return (self._choice.goodput if self._choice else 0.0) * (target.tokens(tokens + 1) - target.tokens(tokens))

    @property
    def _kind(self) -> bool | None:
        """Whether the latest decision drafts for all, or for none; None where it does for some."""
        if self._choice is None:
            return False
        drafted = self._choice.counts > 0
        return None if drafted.any() and not drafted.all() else bool(drafted.any())

    def _is_other(self, load: Load) -> bool:
        """Whether the round has other known tokens to compute than the decision was made for."""
        others = self._made[1]
        return abs(load.catching_up - others) > 16 + others // 8

    def _is_old(self, load: Load) -> bool:
        if self._made[0] != self.cost.changed or self._is_other(load):
            return True
        moved = self.acceptance.rates(self._ids) - self._rates
        return float(moved @ moved) > len(moved) * DRIFT**2

    def _carry_over(self, ids: list[str], load: Load, sudden: bool) -> None:
        """The latest decision for others than it was made for: each keeps its length, new ones get the usual one.

        What one that ended had earned says little about the next. Where the number is ``sudden``ly another, all get
        the usual one for as many.
        """
        drafting = self._newest.depth > 0 or any([budget.depth for budget in self._budgets])
        if not sudden and not drafting and self._decided is None:  # the decision stands: nothing, also for the new ones
            self._ids, self._rates = ids, self._everybody
            self._take([NOTHING] * len(ids))
            return
        usual, brief = self._usual.get(len(ids), self._newest) if sudden else self._newest, None
        given = self._given
        if self._decided is not None and not sudden:
            brief, given = given, self._decided[1]  # what interrupts a decision ends in its time, and is not carried on
        budgets = [usual if sudden else given.get(id, usual) for id in ids]
        if not self.setting.offer.free:
            budgets = self.residents.settle(ids, budgets, [len(sequence.tokens) for sequence in load.ready])
        self._ids, self._decided = ids, None
        if sudden:
            self._count = len(ids)
        self._take(budgets)
        if brief is not None:
            self._decided = self._budgets, self._given
            plain = not any(budget.depth for budget in brief.values())  # a round is one without any draft, or is not
            found = [NOTHING if plain else brief.get(id, budget) for id, budget in zip(ids, budgets, strict=True)]
            self._take(found)
        self._age = KEEP  # decided anew at the next look

    def _decide(self, rates: Floats, load: Load) -> None:
        if not self.options.per_sequence:
            rates = np.full(len(load.ready), self.acceptance.everybody)
        now, lengths = rates, [len(sequence.tokens) for sequence in load.ready]
        backlog = None if self.setting.offer.free else self.residents.backlog(load.ready, lengths)
        situation = self._problem.situation(load, lengths, backlog)
        solve = self._problem.each if self.options.per_sequence else self._problem.alike
        rates, self._choice, budgets = self._with_members(rates, situation, solve)
        self._age = 0 if self.members.most == 1 or self.members.settled else KEEP - SOON
        counts, brief, self._brief = self._choice.counts, list(budgets), 1
        other = self._other_length(rates, counts, situation)
        if other is not None:
            brief, self._brief = other, IN_A_ROW
        elif self.probes.due and counts.min() == 0 and self.setting.longest:
            for place in self._probe(rates, counts, situation, load):
                brief[place] = Budget(depth=self._probe_length, max_nodes=self._probe_length)
                self._brief = ROUNDS
        if not self.setting.offer.free:
            budgets = self.residents.settle(self._ids, budgets, lengths)
        if self._made[0] != self.cost.changed:
            self._usual.clear()
        self._count = len(budgets)
        self._usual[self._count] = self._for_anybody(situation, load)
        self._everybody = self.acceptance.everybody
        self._rates, self._made = now, (self.cost.changed, load.catching_up)
        self._take(budgets)
        self._decided = None
        if brief != budgets:
            self._decided = self._budgets, self._given
            self._take(brief)

    def _other_length(self, rates: Floats, counts: Ints, situation: Situation) -> list[Budget] | None:
        """Budgets without drafts, or with drafts one step shorter or longer, where it is time to look at those."""
        assert self._choice is not None
        if not counts.any() or not self.probes.other_due:
            return None
        longest = (self._problem.menu.gains[self._problem.menu.rows(rates)] > 0).sum(axis=1)
        lengths = {
            PLAIN: np.zeros_like(counts),
            "longer": np.where(counts > 0, np.minimum(counts + 1, longest), 0),
            "shorter": np.where(counts > 1, counts - 1, counts),
        }
        lengths = {name: other for name, other in lengths.items() if (other != counts).any()}
        others = {name: self._problem.outcome(rates, other, situation) for name, other in lengths.items()}
        chosen = self.probes.other(self._choice, others)
        if chosen is None:
            return None
        menu, rows = self._problem.menu.budgets, self._problem.menu.rows(rates).tolist()
        budgets = [menu[row][count] for row, count in zip(rows, lengths[chosen].tolist(), strict=True)]
        if self.members.most > 1:
            budgets = [replace(each, drafters=self.members.count) if each.depth else each for each in budgets]
        return budgets

    def _take(self, budgets: list[Budget]) -> None:
        self._budgets, self._given = budgets, dict(zip(self._ids, budgets, strict=True))

    def _for_anybody(self, situation: Situation, load: Load) -> Budget:
        """The best single length for as many sequences, all with everybody's rate.

        Where others have drafts one that comes anew has one too: a round of few drafts takes nearly as long as one of
        many. Where nobody has one, the text that has to be fed first counts.
        """
        rates, backlog = np.full(situation.sequences, self.acceptance.everybody), None
        if self._choice is not None and not self._choice.counts.any() and not self.setting.offer.free:
            backlog = self._problem.feeding(np.full(situation.sequences, self.residents.to_begin(load.ready)))
        budget = self._problem.alike(rates, replace(situation, backlog=backlog))[1][0]
        if self.members.most > 1 and budget.depth:
            budget = replace(budget, drafters=self.members.count)
        self._newest = budget
        return budget

    def _with_members(self, rates: Floats, situation: Situation, solve: Solver) -> tuple[Floats, Choice, list[Budget]]:
        """The best lengths with the best number of drafters among the present one and its neighbours."""
        if self.members.most == 1:
            return rates, *solve(rates, situation)
        everybody, found = self.acceptance.everybody, {}
        for m in self.members.nearby:
            self.cost.drafters = m
            shifted = self.members.shifted(rates, m, everybody)
            found[m] = (shifted, *solve(shifted, situation))
        best = max(found, key=lambda m: (found[m][1].goodput, -m))
        self.members.count = self.cost.drafters = best
        shifted, choice, budgets = found[best]
        return shifted, choice, [replace(budget, drafters=best) if budget.depth else budget for budget in budgets]

    def _probe(self, rates: Floats, counts: Ints, situation: Situation, load: Load) -> Seq[int]:
        """Who is drafted for, although that is not expected to pay."""
        hopeful, _ = self._problem.each(np.where(counts == 0, OPTIMISTIC, rates), situation)
        idle = np.flatnonzero((counts == 0) & ((hopeful.counts > 0) | self.probes.forgotten))
        if not len(idle):
            return ()
        behind = self.residents.behind([load.ready[place] for place in idle.tolist()])
        steps = ROUNDS * self._probe_length * self._problem.token_cost(situation)
        costs = self._problem.feeding(behind) + steps
        drafted = sum(
            self._problem.menu.sizes[row, :k].sum()
            for row, k in zip(self._problem.menu.rows(rates), counts, strict=True)
        )
        return self.probes.choose(idle, costs, self._problem.round(situation), int(drafted), float(rates[idle].mean()))
