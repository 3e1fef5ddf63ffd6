"""Measures the cost of a policy's decision, in microseconds and as a share of a step.

Run ``python -m benchmarks.policy_cost``. Steps are simulated: acceptance is drawn, and seconds come from a latency
model similar to the zoo on two cores. So policies decide as often as in an engine. Heads draft trees in one pass, and
each level of their drafts is accepted less often than the level before. Times are thread times, which other processes
lengthen by shared caches alone. The clock takes as long as a plan that changes nothing. So the time of an empty call,
measured in every step, is subtracted.

All policies of a batch run in turn, a block of steps each, in a new order for every turn. The first turn warms up the
policies. A share is the median over the blocks of the other turns, with an interval from resampled blocks.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import write
from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import BatchState, Commit, DraftBudget, Request, RequestState
from cospec.drafters.medusa import MedusaDrafter
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels
from cospec.policies.policy_build_context import PolicyContext
from cospec.process_utils import freeze_gc
from cospec.registry import POLICIES
from cospec.sampling_params import SamplingParams

COSTS = LatencyModels(
    ForwardLatency(context=1e-7, slopes=(3e-5, 1.6e-4), knees=(24.0,), sequence=1e-5, fixed=1.2e-3),
    ForwardLatency(context=1e-8, slopes=(1.5e-5,), fixed=2e-4),
)
SLOW_TARGET = LatencyModels(
    ForwardLatency(context=1e-7, slopes=(3e-5,), fixed=0.05), ForwardLatency(context=1e-8, slopes=(1.5e-5,), fixed=2e-4)
)  # drafts grow beyond the default limit
BATCHES = (1, 8, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """A policy and what it plans for.

    Attributes:
        options: of the policy.
        costs: of a step.
        capabilities: of the drafter.
        fall: acceptance of a level over that of the level before.
    """

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    costs: LatencyModels = COSTS
    capabilities: DrafterCapabilities = DrafterCapabilities()
    fall: float = 1.0


VARIANTS = {
    "goodput, batch choice": Case("goodput", {"choose_batch": True}),
    "goodput, slow target": Case("goodput", costs=SLOW_TARGET),
    "goodput, rates by position": Case("goodput", {"per_position": True}),
    "goodput, trees": Case("goodput", {"trees": True}),
    "goodput, heads": Case("goodput", capabilities=MedusaDrafter.capabilities, fall=0.8),
    "goodput, heads, rates by level": Case(
        "goodput", {"per_position": True}, capabilities=MedusaDrafter.capabilities, fall=0.8
    ),
}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="steps of a block")
    parser.add_argument("--turns", type=int, default=12, help="measured blocks of each policy")
    parser.add_argument("--policies", nargs="*", default=[name for name in POLICIES if name != "milp"])
    options = parser.parse_args()
    cases = {name: Case(name) for name in options.policies}
    if "goodput" in options.policies:
        cases |= VARIANTS
    rows = [row for batch in BATCHES for row in measure(cases, batch, options.turns, options.rounds)]
    table = Table("policy", "batch", "plan µs", "p90", "new decisions", "observe µs", "round ms", "share")
    for row in rows:
        table.add_row(
            row["policy"],
            str(row["batch"]),
            *(f"{row[key]:.1f}" for key in ("plan_us", "plan_p90_us")),
            f"{row['decisions']:.0%}",
            *(f"{row[key]:.1f}" for key in ("observe_us", "round_ms")),
            f"{row['share']:.2%} ({row['low']:.2%} to {row['high']:.2%})",
        )
    Console(width=120).print(table)
    print("written to", write("policy_cost", {"options": vars(options), "rows": rows}))


def measure(cases: dict[str, Case], batch: int, turns: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per case, by label; all cases take turns, after one turn that is not measured."""
    runs = {label: Run(case, batch) for label, case in cases.items()}
    shuffler, blocks = random.Random(0), {label: list[dict[str, float]]() for label in cases}
    freeze_gc()  # as in a server's process
    for turn in range(-1, turns):
        for label in shuffler.sample(list(runs), len(runs)):
            block = runs[label].block(rounds)
            if turn >= 0:
                blocks[label].append(block)
    return [{"policy": label, "batch": batch, **summary(each)} for label, each in blocks.items()]


def summary(blocks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the medians over blocks, and the 95% interval of the median share."""
    shares = np.array([block["share"] for block in blocks])
    draws = np.random.default_rng(0).choice(shares, (2000, len(shares)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    found = {key: float(np.median([block[key] for block in blocks])) for key in blocks[0]}
    return {**found, "low": float(low), "high": float(high)}


class Run:
    """A policy and the simulated requests that the policy plans for."""

    def __init__(self, case: Case, batch: int) -> None:
        cls, context = POLICIES.load(case.policy), PolicyContext(costs=case.costs, capabilities=case.capabilities)
        self._policy: Policy = cls.build(cls.Options.model_validate(case.options), context)
        self._case, self._rng, self._step = case, np.random.default_rng(0), 0
        self._rates = self._rng.uniform(0.5, 0.98, batch)
        params = SamplingParams(max_tokens=9999)
        self._ready = [RequestState(Request(f"s{n}", (1,) * 8, params, 0), [1] * 200) for n in range(batch)]
        self._budgets: list[DraftBudget] | None = None

    def block(self, rounds: int) -> dict[str, float]:
        """Run ``rounds`` steps; return mean microseconds of planning and learning, and their share of the steps."""
        load, plans, observes, seconds, made = BatchState(self._ready), list[float](), 0.0, 0.0, 0
        for _ in range(rounds):
            empty = timed(lambda: None)[1]
            budgets, spent = timed(lambda: self._policy.plan(load))
            plans.append(spent - empty)
            made += budgets is not self._budgets
            self._budgets, self._step = budgets, self._step + 1
            taken = [each for each in zip(self._ready, budgets, self._rates, strict=True) if not each[1].skip_step]
            fall = self._case.fall
            commits = [verified_commit(one, budget, (rate, fall), self._rng) for one, budget, rate in taken]
            stats = measured(self._step, [budget for _, budget, _ in taken], self._case)
            seconds += stats.total
            _, spent = timed(partial(self._policy.observe, stats, commits))
            observes += spent - empty
        return {
            "plan_us": sum(plans) / rounds * 1e6,
            "plan_p90_us": float(np.quantile(plans, 0.9)) * 1e6,
            "decisions": made / rounds,
            "observe_us": observes / rounds * 1e6,
            "round_ms": seconds / rounds * 1e3,
            "share": (sum(plans) + observes) / seconds,
        }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and its process seconds."""
    started = time.thread_time()
    found = call()
    return found, time.thread_time() - started


def verified_commit(
    one: RequestState, budget: DraftBudget, rates: tuple[float, float], rng: np.random.Generator
) -> Commit:
    """Return the commit of a draft.

    Args:
        rates: acceptance of each token of the first level, and the factor of each further level.
    """
    (rate, fall), n, ranks = rates, len(one.tokens), list[int]()
    for level in range(budget.depth):
        width = budget.widths[level] if level < len(budget.widths) else 1
        right = np.flatnonzero(rng.random(width) < rate * fall**level)
        if not len(right):
            break
        ranks.append(int(right[0]))
    kept, rejected = len(ranks), len(ranks) < budget.depth
    places = tuple(ranks) if max(budget.widths, default=1) > 1 else ()
    return Commit(
        one.id, n, (1,) * (kept + 1), tuple(range(kept)), n, budget.max_nodes, rejected=rejected, ranks=places
    )


def measured(step: int, budgets: list[DraftBudget], case: Case) -> StepStats:
    """Return the simulated time of the step."""
    costs, n = case.costs, len(budgets)
    proposed, depth = sum(b.max_nodes for b in budgets), max(b.depth for b in budgets)
    assert costs.target is not None and costs.draft is not None
    target = costs.target.seconds(200 * n, n + proposed, n)
    drafts = sum(b.depth > 0 for b in budgets)
    draft = 0.0
    if depth and case.capabilities.single_pass:
        draft = costs.draft.seconds(0.0, proposed, drafts)
    elif depth:
        draft = costs.draft.seconds(200 * n, proposed / depth, drafts, depth)
    times = StepTimes(draft, target)
    return StepStats(step, n, n + proposed, 200 * n, depth, proposed, 0, n, times, draft + target, drafts)


if __name__ == "__main__":
    main()
