"""Measures the cost of a policy's decision, in microseconds and as a share of a step.

Run ``python -m benchmarks.policy_cost``. Steps are simulated: acceptance is drawn, and seconds come from a latency
model similar to the zoo on two cores. So policies decide as often as in an engine. Times are thread times, which
other processes lengthen by shared caches alone. The clock takes as long as a plan that changes nothing. So the time of
an empty call, measured in every step, is subtracted.

All policies of a batch run in turn, a block of steps each, in a new order for every turn. The first turn warms up the
policies. A share is the median over the blocks of the other turns, with an interval from resampled blocks.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import write
from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import BatchState, Commit, DraftBudget, Request, RequestState
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
Case = tuple[str, dict[str, Any], LatencyModels]  # policy, its options, costs of a step
VARIANTS: dict[str, tuple[dict[str, Any], LatencyModels]] = {
    "goodput, batch choice": ({"choose_batch": True}, COSTS),
    "goodput, slow target": ({}, SLOW_TARGET),
    "goodput, rates by position": ({"per_position": True}, COSTS),
    "goodput, trees": ({"trees": True}, COSTS),
}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="steps of a block")
    parser.add_argument("--turns", type=int, default=12, help="measured blocks of each policy")
    parser.add_argument("--policies", nargs="*", default=[name for name in POLICIES if name != "milp"])
    options = parser.parse_args()
    cases: dict[str, Case] = {name: (name, {}, COSTS) for name in options.policies}
    if "goodput" in options.policies:
        cases |= {label: ("goodput", *case) for label, case in VARIANTS.items()}
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
    runs = {label: Run(*case, batch) for label, case in cases.items()}
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

    def __init__(self, name: str, given: dict[str, Any], costs: LatencyModels, batch: int) -> None:
        cls = POLICIES.load(name)
        self._policy: Policy = cls.build(cls.Options.model_validate(given), PolicyContext(costs=costs))
        self._costs, self._rng, self._step = costs, np.random.default_rng(0), 0
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
            commits = [verified_commit(one, budget, rate, self._rng) for one, budget, rate in taken]
            stats = measured(self._step, [budget for _, budget, _ in taken], self._costs)
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


def verified_commit(one: RequestState, budget: DraftBudget, rate: float, rng: np.random.Generator) -> Commit:
    """Return the commit of a chain whose tokens are accepted at ``rate``."""
    kept = int(np.cumprod(rng.random(budget.depth) < rate).sum())
    n = len(one.tokens)
    return Commit(one.id, n, (1,) * (kept + 1), tuple(range(kept)), n, budget.max_nodes, rejected=kept < budget.depth)


def measured(step: int, budgets: list[DraftBudget], costs: LatencyModels) -> StepStats:
    """Return the simulated time of the step."""
    n, proposed, depth = len(budgets), sum(b.max_nodes for b in budgets), max(b.depth for b in budgets)
    assert costs.target is not None and costs.draft is not None
    target = costs.target.seconds(200 * n, n + proposed, n)
    drafts = sum(b.depth > 0 for b in budgets)
    draft = costs.draft.seconds(200 * n, proposed / depth, drafts, depth) if depth else 0.0
    times = StepTimes(draft, target)
    return StepStats(step, n, n + proposed, 200 * n, depth, proposed, 0, n, times, draft + target, drafts)


if __name__ == "__main__":
    main()
