"""Measures the cost of a policy's decision, in microseconds and as a share of a step.

Run ``python -m benchmarks.policy_cost``. Steps are simulated: acceptance is drawn, and seconds come from a latency
model similar to the zoo on two cores. So policies decide anew as often as in an engine. Times are process times, which
other processes do not lengthen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
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
VARIANTS: dict[str, tuple[dict[str, Any], LatencyModels]] = {
    "goodput, batch choice": ({"choose_batch": True}, COSTS),
    "goodput, slow target": ({}, SLOW_TARGET),
    "goodput, rates by position": ({"per_position": True}, COSTS),
    "goodput, trees": ({"trees": True}, COSTS),
}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--policies", nargs="*", default=[name for name in POLICIES if name != "milp"])
    options = parser.parse_args()
    table, rows = Table("policy", "batch", "plan µs", "p90", "new decisions", "observe µs", "round ms", "share"), []
    plain: tuple[dict[str, Any], LatencyModels] = ({}, COSTS)
    cases = [(name, name, *plain) for name in options.policies]
    cases += [(label, "goodput", *case) for label, case in VARIANTS.items() if "goodput" in options.policies]
    for label, name, given, costs in cases:
        for batch in BATCHES:
            cls = POLICIES.load(name)
            policy = cls.build(cls.Options.model_validate(given), PolicyContext(costs=costs))
            row = {"policy": label, "batch": batch, **cost(policy, costs, batch, options.rounds)}
            rows.append(row)
            table.add_row(
                label,
                str(batch),
                *(f"{row[key]:.1f}" for key in ("plan_us", "plan_p90_us")),
                f"{row['decisions']:.0%}",
                *(f"{row[key]:.1f}" for key in ("observe_us", "round_ms")),
                f"{row['share']:.2%}",
            )
    Console().print(table)
    print("written to", write("policy_cost", {"rows": rows}))


def cost(policy: Policy, costs: LatencyModels, batch: int, rounds: int) -> dict[str, float]:
    """Return mean microseconds of planning and learning, and their share of a step."""
    rng = np.random.default_rng(0)
    ready = [
        RequestState(Request(f"s{n}", (1,) * 8, SamplingParams(max_tokens=9999), 0), [1] * 200) for n in range(batch)
    ]
    rates = rng.uniform(0.5, 0.98, batch)
    load, plans, observes, seconds, before, made = BatchState(ready), [], [], 0.0, None, 0
    for step in range(rounds):
        budgets, spent = timed(lambda: policy.plan(load))
        plans.append(spent)
        made += budgets is not before
        before = budgets
        taken = [each for each in zip(ready, budgets, rates, strict=True) if not each[1].skip_step]
        commits = [verified_commit(one, budget, rate, rng) for one, budget, rate in taken]
        stats = measured(step, [budget for _, budget, _ in taken], costs)
        seconds += stats.total
        _, spent = timed(partial(policy.observe, stats, commits))
        observes.append(spent)
    warm = slice(rounds // 4, None)
    plan, observe, each = float(np.mean(plans[warm])), float(np.mean(observes[warm])), seconds / rounds
    return {
        "plan_us": plan * 1e6,
        "plan_p90_us": float(np.quantile(plans[warm], 0.9)) * 1e6,
        "decisions": made / rounds,
        "observe_us": observe * 1e6,
        "round_ms": each * 1e3,
        "share": (plan + observe) / each,
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
