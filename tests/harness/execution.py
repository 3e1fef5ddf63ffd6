"""Rounds without models: acceptances are drawn, seconds are computed, a policy decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import BatchState, Commit, DraftBudget, Request, RequestState
from cospec.policies.goodput.draft_shapes import tree_tokens
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels
from cospec.sampling_params import SamplingParams

# About a target of 22M parameters and its drafter on two cores, and an accelerator's flat start.
CPU = LatencyModels(
    ForwardLatency(1e-7, (3e-5, 1.6e-4), (24,), 1e-5, 1.2e-3), ForwardLatency(1e-8, (1.5e-5,), (), 0, 2e-4)
)
FLAT = LatencyModels(ForwardLatency(2e-8, (2e-6, 1e-4), (256,), 0, 2e-2), ForwardLatency(2e-9, (1e-6,), (), 0, 1.2e-3))

Rates = Callable[[int], np.ndarray]
"""From the number of the round to the acceptance rate of each sequence."""


def sequences(count: int, length: int = 200) -> list[RequestState]:
    """As many sequences, each with ``length`` known tokens and no end in sight."""
    params = SamplingParams(max_tokens=100_000)
    return [RequestState(Request(f"s{n}", (1,) * 8, params, 0), [1] * length) for n in range(count)]


@dataclass
class World:
    """A machine and its sequences."""

    costs: LatencyModels
    rates: Rates
    count: int
    seed: int = 0
    stream_kind: float = 0.0  # standard deviation of the log of measured times
    other_prefill_tokens: int = 0
    capabilities: DrafterCapabilities = DrafterCapabilities()
    burst: int = 1  # rounds that may be run as one, as far as a plan lasts
    overhead: float = 0.0  # seconds for each sequence of a round with drafts, in none of its parts
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
            budgets = policy.plan(BatchState(ready, self.other_prefill_tokens))
            assert len(budgets) == len(ready)
            seen = []
            for _ in range(min(self.burst, policy.horizon, first + rounds - step)):
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

    def _judge(self, one: RequestState, budget: DraftBudget, rate: float, chance: np.random.Generator) -> Commit:
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
        self, step: int, budgets: list[DraftBudget], commits: list[Commit], chance: np.random.Generator
    ) -> StepStats:
        n, proposed = len(budgets), sum(budget.max_nodes for budget in budgets)
        context, depth = 199 * n, max(budget.depth for budget in budgets)
        tokens = n + proposed + self.other_prefill_tokens
        assert self.costs.target is not None and self.costs.draft is not None
        target = self.costs.target.seconds(context, tokens, n) * np.exp(self.stream_kind * chance.standard_normal())
        draft = 0.0
        if depth:
            width = proposed / depth
            drafts = sum(budget.depth > 0 for budget in budgets)
            passes, width = (1, proposed) if self.capabilities.single_pass else (depth, width)
            draft = self.costs.draft.seconds(context / n * width, width, drafts, passes)
            draft *= not self.capabilities.costless
            draft *= np.exp(self.stream_kind * chance.standard_normal())
        committed = sum(len(commit.tokens) for commit in commits)
        accepted = sum(len(commit.path) for commit in commits)
        total = draft + target + 1e-5 * (n + 1) + self.overhead * n * (depth > 0)
        return StepStats(
            step,
            n,
            tokens,
            context,
            depth,
            proposed,
            accepted,
            committed,
            StepTimes(draft, target),
            total,
            sum(budget.depth > 0 for budget in budgets),
        )


def as_one(seen: list[tuple[StepStats, list[Commit]]]) -> tuple[StepStats, list[Commit]]:
    """The statistics of steps that ran as one call."""
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
    times = StepTimes.of(tuple((stats.times.draft, stats.times.target) for stats, _ in seen))
    return replace(first, depth=max(stats.depth for stats, _ in seen), times=times, **sums), commits


def steady(*rates: float) -> Rates:
    """The same rates in every round."""
    return lambda step: np.array(rates)
