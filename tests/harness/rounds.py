"""Rounds without models: acceptances are drawn, seconds are computed, a policy decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from cospec.params import SamplingParams
from cospec.plugins import Policy
from cospec.policies.cost import ForwardCost
from cospec.policies.menu import tree_tokens
from cospec.policies.round_cost import Costs
from cospec.stats import RoundStats, RoundTimes
from cospec.types import Budget, Commit, Load, Offer, Request, Sequence

# About a target of 22M parameters and its drafter on two cores, and an accelerator's flat start.
CPU = Costs(ForwardCost(1e-7, (3e-5, 1.6e-4), (24,), 1e-5, 1.2e-3), ForwardCost(1e-8, (1.5e-5,), (), 0, 2e-4))
FLAT = Costs(ForwardCost(2e-8, (2e-6, 1e-4), (256,), 0, 2e-2), ForwardCost(2e-9, (1e-6,), (), 0, 1.2e-3))

Rates = Callable[[int], np.ndarray]
"""From the number of the round to the acceptance rate of each sequence."""


def sequences(count: int, length: int = 200) -> list[Sequence]:
    """As many sequences, each with ``length`` known tokens and no end in sight."""
    params = SamplingParams(max_tokens=100_000)
    return [Sequence(Request(f"s{n}", (1,) * 8, params, 0), [1] * length) for n in range(count)]


@dataclass
class World:
    """A machine and its sequences."""

    costs: Costs
    rates: Rates
    count: int
    seed: int = 0
    noise: float = 0.0  # standard deviation of the log of measured times
    catching_up: int = 0
    offer: Offer = Offer()
    burst: int = 1  # rounds that may be run as one, as far as a plan lasts
    beside: float = 0.0  # seconds for each sequence of a round with drafts, in none of its parts
    lengths: list[list[int]] = field(default_factory=list)  # chosen, by round
    tokens: float = 0.0
    seconds: float = 0.0

    def play(self, policy: Policy, rounds: int, first: int = 0, until: Callable[[], bool] = lambda: False) -> float:
        """Expected tokens per second of the rounds; what is judged, and learned from, is drawn.

        Ends early once ``until``, which is called after each round, is true.
        """
        chance = np.random.default_rng(self.seed)
        ready = sequences(self.count)
        self.tokens = self.seconds = 0.0
        self.lengths = []
        step = first
        while step < first + rounds:
            budgets = policy.plan(Load(ready, self.catching_up))
            assert len(budgets) == len(ready)
            seen = []
            for _ in range(min(self.burst, policy.lasts, first + rounds - step)):
                rates = self.rates(step)
                pairs = list(zip(ready, budgets, rates, strict=True))
                commits = [self._judge(one, budget, rate, chance) for one, budget, rate in pairs]
                stats = self._stats(step, budgets, commits, chance)
                seen.append((stats, commits))
                self.tokens += sum(tree_tokens(rate, b.widths or (1,) * b.depth) for _, b, rate in pairs)
                self.seconds += stats.total
                self.lengths.append([budget.depth for budget in budgets])
                step += 1
            policy.observe(*as_one(seen))
            if until():
                break
        return self.tokens / self.seconds

    def _judge(self, one: Sequence, budget: Budget, rate: float, chance: np.random.Generator) -> Commit:
        kept = 0
        for level in range(budget.depth):
            width = budget.widths[level] if budget.widths else 1
            if chance.random() >= 1.0 - (1.0 - rate) ** width:
                break
            kept += 1
        n = len(one.tokens)
        return Commit(
            one.id, n, (1,) * (kept + 1), tuple(range(kept)), n, budget.max_nodes, rejected=kept < budget.depth
        )

    def _stats(
        self, step: int, budgets: list[Budget], commits: list[Commit], chance: np.random.Generator
    ) -> RoundStats:
        n, proposed = len(budgets), sum(budget.max_nodes for budget in budgets)
        context, depth = 199 * n, max(budget.depth for budget in budgets)
        tokens = n + proposed + self.catching_up
        assert self.costs.target is not None and self.costs.draft is not None
        target = self.costs.target.seconds(context, tokens, n) * np.exp(self.noise * chance.standard_normal())
        draft = 0.0
        if depth:
            width = proposed / depth
            drafts = sum(budget.depth > 0 for budget in budgets)
            passes, width = (1, proposed) if self.offer.at_once else (depth, width)
            draft = self.costs.draft.seconds(context / n * width, width, drafts, passes)
            draft *= not self.offer.free
            draft *= np.exp(self.noise * chance.standard_normal())
        committed = sum(len(commit.tokens) for commit in commits)
        accepted = sum(len(commit.path) for commit in commits)
        total = draft + target + 1e-5 * (n + 1) + self.beside * n * (depth > 0)
        return RoundStats(
            step,
            n,
            tokens,
            context,
            depth,
            proposed,
            accepted,
            committed,
            RoundTimes(draft, target),
            total,
            sum(budget.depth > 0 for budget in budgets),
        )


def as_one(seen: list[tuple[RoundStats, list[Commit]]]) -> tuple[RoundStats, list[Commit]]:
    """What an engine tells of rounds that it ran as one."""
    first, commits = seen[0][0], [commit for _, own in seen for commit in own]
    sums = {
        name: sum(getattr(stats, name) for stats, _ in seen)
        for name in [
            "sequences",
            "batched_tokens",
            "context_tokens",
            "proposed",
            "accepted",
            "committed",
            "total",
            "drafts",
        ]
    }
    times = RoundTimes.of(tuple((stats.times.draft, stats.times.target) for stats, _ in seen))
    return replace(first, depth=max(stats.depth for stats, _ in seen), times=times, **sums), commits


def steady(*rates: float) -> Rates:
    """The same rates in every round."""
    return lambda step: np.array(rates)
