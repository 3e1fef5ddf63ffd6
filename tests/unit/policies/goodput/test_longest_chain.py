"""Where a step of the target is slow, ``goodput`` drafts more than its default limit; a configured limit is kept."""

from __future__ import annotations

from typing import Any

import pytest

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels
from cospec.policies.policy_build_context import PolicyContext
from cospec.simulation.run import simulate
from cospec.simulation.scenario import (
    ArrivalConfig,
    DomainConfig,
    DrafterConfig,
    LatencyConfig,
    LengthConfig,
    Scenario,
    ScenarioVariant,
    TargetConfig,
)
from harness.execution import World, steady


def mean_lengths(fixed: float) -> dict[str, float]:
    """Mean draft lengths where a forward of the target takes ``fixed`` seconds and a drafted token 1 ms."""
    scenario = Scenario(
        requests=4,
        max_num_seqs=1,
        target=TargetConfig(cost=LatencyConfig(slopes=(1e-4,), fixed=fixed)),
        drafting=DrafterConfig(cost=LatencyConfig(slopes=(1e-5,), fixed=1e-3)),
        domains=(DomainConfig(acceptance=0.9, prompt=LengthConfig(mean=8), output=LengthConfig(mean=256)),),
        arrivals=ArrivalConfig(kind="closed", concurrency=(1,)),
        variants=(
            ScenarioVariant(name="auto"),
            ScenarioVariant(name="configured", num_speculative_tokens=8),
        ),
    )
    runs: list[Any] = simulate(scenario)["runs"]
    return {run["variant"]: run["mean_k"] for run in runs}


@pytest.mark.parametrize(("fixed", "grows"), [(0.4, True), (0.004, False)])
def test_the_limit_follows_the_costs(fixed: float, grows: bool) -> None:
    found = mean_lengths(fixed)
    assert found["configured"] <= 8
    assert (found["auto"] > 10) is grows


@pytest.mark.parametrize(
    ("capabilities", "grows"),
    [
        (DrafterCapabilities(), True),
        (DrafterCapabilities(trees=True, costless=True), True),
        (DrafterCapabilities(trees=True, single_pass=True), False),
    ],
)
def test_drafters_of_trees_grow_too_but_not_heads(capabilities: DrafterCapabilities, grows: bool) -> None:
    slow = LatencyModels(ForwardLatency(slopes=(1e-4,), fixed=1.0), ForwardLatency(slopes=(1e-5,), fixed=1e-3))
    policy = Goodput.build(GoodputOptions(probe_share=0.0), PolicyContext(costs=slow, capabilities=capabilities))
    world = World(slow, steady(0.97, 0.97), 2, capabilities=capabilities)
    world.play(policy, 600)
    assert (max(map(max, world.lengths)) > 10) is grows
