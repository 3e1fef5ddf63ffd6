"""Walking downhill: near the best fixed length from any start, also after a change; the paper's own rule runs away."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.policies.fixed import Fixed
from cospec.policies.latency.step import LatencyModels
from cospec.policies.slope import Slope, SlopeOptions, trend
from harness.execution import CPU, FLAT, Rates, World, steady

LONGEST = 8
MODES = 6000


class PapersRule(Slope):
    """Minions section 3.3 to the letter: every rise is punished by subtracting, every fall rewarded by adding."""

    def _decide(self) -> None:
        slope = trend(self._previous[-len(self._current) :], self._current, 0.0)
        self._move(-1 if slope > 0 else 1)

    def _move(self, direction: int) -> None:
        self.length = min(max(1, self.length + direction), self.longest)
        self._previous, self._current = self._current, []


def best(world_rates: Rates, costs: LatencyModels, count: int) -> int:
    """The fixed length with the most tokens per second."""
    found = [World(costs, world_rates, count).play(Fixed(k), 200) for k in range(1, LONGEST + 1)]
    return 1 + int(np.argmax(found))


CASES = {
    "short": (CPU, steady(*[0.55] * 8), 8),
    "middle": (CPU, steady(*[0.8] * 3), 3),
    "long": (FLAT, steady(*[0.9] * 16), 16),
}


def late(world: World) -> float:
    """The middle length of the last third."""
    return float(np.median([lengths[0] for lengths in world.lengths[-MODES // 3 :]]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("start", [1, 4, 8])
def test_within_one_of_the_best_from_any_start(case: str, start: int) -> None:
    costs, rates, count = CASES[case]
    world = World(costs, rates, count, seed=start, stream_kind=0.03)
    world.play(Slope(SlopeOptions(start=start), LONGEST), MODES)
    assert abs(late(world) - best(rates, costs, count)) <= 1


@pytest.mark.parametrize(("before", "after"), [("short", 0.93), ("middle", 0.3)])
def test_the_workload_changes(before: str, after: float) -> None:
    costs, rates, count = CASES[before]
    policy = Slope(SlopeOptions(), LONGEST)
    first, then = (
        World(costs, rates, count, stream_kind=0.03),
        World(costs, steady(*[after] * count), count, stream_kind=0.03),
    )
    first.play(policy, MODES)
    then.play(policy, MODES, MODES)
    assert abs(late(first) - best(rates, costs, count)) <= 1
    assert abs(late(then) - best(then.rates, costs, count)) <= 1


def test_the_papers_rule_runs_away() -> None:
    """Every rise subtracts, also one that a subtraction caused: it runs down to 1 again and again."""
    costs, rates, count = CASES["long"]
    near = {}
    for acceptance_method in (PapersRule, Slope):
        world = World(costs, rates, count, stream_kind=0.03)
        world.play(acceptance_method(SlopeOptions(start=4), LONGEST), MODES)
        found = np.array(world.lengths)[MODES // 3 :, 0]
        near[acceptance_method] = float((abs(found - best(rates, costs, count)) <= 1).mean())
        assert (found.min() == 1) == (acceptance_method is PapersRule)
    assert near[PapersRule] < 0.5 < 0.9 < near[Slope]


def test_rounds_of_other_lengths_do_not_count() -> None:
    policy = Slope(SlopeOptions(start=3, decision_threshold=4), LONGEST)
    world = World(CPU, steady(0.9), 1)
    for _ in range(10):
        world.play(Fixed(5), 1)
    assert policy.gauges()["speculation_length"] == 3
    world.play(policy, 5)
    assert policy.length == 4


def test_trend() -> None:
    rise, chance = list(np.linspace(1, 2, 40)), np.random.default_rng(0)
    assert trend(rise[:20], rise[20:], 2.0) == 1
    assert trend(rise[::-1][:20], rise[::-1][20:], 2.0) == -1
    assert trend(list(chance.standard_normal(40)), list(chance.standard_normal(40)), 4.0) == 0
    assert trend([], [1.0], 2.0) == 0
