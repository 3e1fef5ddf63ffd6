"""Where a step of the target is slow, ``goodput`` drafts more than its default limit; a configured limit is kept."""

from __future__ import annotations

from typing import Any

import pytest

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
