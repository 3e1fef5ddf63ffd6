"""The costs of a step: what overlaps, and steps that verify one of two halves."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import BatchState
from cospec.policies.goodput.draft_shapes import chains
from cospec.policies.goodput.length_problem import LengthProblem
from cospec.policies.goodput.step_costs import LengthInputs, StepBounds, StepCosts
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels, StepLatency
from harness.execution import sequences

TARGET, DRAFT = ForwardLatency(slopes=(5e-4,), fixed=0.1), ForwardLatency(slopes=(0.0,), fixed=0.016)

NO_BOUNDS = StepBounds()


def overlapping(bounds: StepBounds = NO_BOUNDS, groups: int = 1) -> LengthProblem:
    """Chains for a target and a drafter with hardware of its own, whose steps were measured."""
    latency = StepLatency(LatencyModels(TARGET, DRAFT))
    for step in range(8):
        latency.observe(StepStats(step, 3, 15, 600, 4, 12, 6, 9, StepTimes(0.064, 0.1075), 0.1075, 3, groups=groups))
    latency.learn()
    assert latency.overlaps(alone=False)
    return LengthProblem([chains(8)], StepCosts(latency, bounds))


def inputs(problem: LengthProblem, groups: int, token_budget: int = 2048) -> LengthInputs:
    load = BatchState(sequences(6), token_budget=token_budget)
    return problem.costs.inputs(load, [200.0] * 6, None, groups)


def test_drafting_overlaps_with_the_whole_forward_of_the_target() -> None:
    problem = overlapping()
    limits = problem.limits(inputs(problem, 1))
    assert limits.duration(24, 0.0, 4) == pytest.approx(0.1 + 30 * 5e-4, rel=0.02), "0.064 seconds of drafts are hidden"
    assert limits.duration(0, 0.0, 8) == pytest.approx(0.128, rel=0.02), "drafts that take longer are not"


@pytest.mark.parametrize(("rate", "tokens"), [(0.8, 3.3616), (0.3, 1.4251)])
@pytest.mark.parametrize("per_sequence", [True, False])
def test_drafts_for_halves_of_the_batch_pay_if_they_commit_twice_the_tokens(
    rate: float, tokens: float, per_sequence: bool
) -> None:
    problem, rates = overlapping(), np.full(6, rate)
    whole, _ = problem.solve(rates, inputs(problem, 1), per_sequence)
    half, budgets = problem.solve(rates, inputs(problem, 2), per_sequence)
    assert whole.counts.all()
    assert bool(half.counts.any()) is (tokens > 2)
    (depth,) = {budget.depth for budget in budgets}
    if depth:
        kept = (rate ** np.arange(depth + 1)).sum()
        seconds = max(0.016 * depth, 0.1 + 3 * (1 + depth) * 5e-4)
        assert half.goodput == pytest.approx(3 * kept / seconds, rel=0.05)
        shorter = problem.outcomes(
            problem.steps(np.full(6, round(rate * 64)), inputs(problem, 2)),
            half.counts[None] - 1,
            inputs(problem, 2),
        )
        assert shorter[0].goodput <= half.goodput


@pytest.mark.parametrize("per_sequence", [True, False])
def test_bounds_hold_for_steps_of_a_half(per_sequence: bool) -> None:
    rates = np.full(6, 0.9)

    def solve(bounds: StepBounds, token_budget: int = 2048) -> tuple[list[int], float]:
        problem = overlapping(bounds)
        choice, budgets = problem.solve(rates, inputs(problem, 2, token_budget), per_sequence)
        return [budget.depth for budget in budgets], choice.seconds

    assert max(solve(NO_BOUNDS)[0]) == 7
    assert max(solve(StepBounds(tokens=0))[0]) == 0
    lengths, seconds = solve(StepBounds(seconds=0.107))
    assert 0 < max(lengths) < 7 and seconds <= 0.107
    assert max(solve(StepBounds(seconds=0.01))[0]) == 0
    lengths, _ = solve(NO_BOUNDS, token_budget=6 + 20)
    assert 0 < sum(lengths) <= 20, "the plan has room for both halves"


def test_one_sequence_has_no_halves_and_waits_for_its_draft() -> None:
    problem = overlapping(groups=2)
    alone, two = (problem.costs.inputs(BatchState(sequences(n)), [200.0] * n, None, 2) for n in (1, 2))
    assert (alone.groups, problem.limits(alone).overlap) == (1, False)
    assert (two.groups, problem.limits(two).overlap) == (2, True)
