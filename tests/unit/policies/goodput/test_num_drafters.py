"""How many drafters take part: as many as pay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.plugin_base import Policy
from cospec.core.types import BatchState, Commit, DraftBudget
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.goodput.num_drafters import NumDrafters
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels
from cospec.policies.policy_build_context import PolicyContext
from harness.execution import World, sequences

TARGET = ForwardLatency(1e-7, (1e-5, 2e-4), (64,), 0.0, 5e-3)


class Pool(World):
    """Three drafters: every further one costs as much as the first, and helps by ``helps``."""

    helps = 0.0

    def play(self, policy: Policy, rounds: int, first: int = 0, until: Callable[[], bool] = lambda: False) -> float:
        asked: list[int] = []

        def rates(step: int) -> np.ndarray:
            budgets = policy.plan(BatchState(sequences(self.count), self.other_prefill_tokens))
            now = max((budget.drafters or 1 for budget in budgets if budget.depth), default=1)
            asked.append(now)
            one = ForwardLatency(1e-8, (1e-5,), (), 0.0, 3e-4)
            self.costs = LatencyModels(TARGET, one.scaled(now))
            return np.full(self.count, 0.5 + self.helps * (now - 1))

        self.rates = rates
        found = super().play(policy, rounds, first, until)
        self.asked = asked
        return found


def pool(helps: float, count: int = 4) -> Pool:
    made = Pool(LatencyModels(TARGET, ForwardLatency()), lambda step: np.zeros(1), count)
    made.helps = helps
    return made


def policy(choose: bool = True) -> Goodput:
    whole = ForwardLatency(1e-8, (1e-5,), (), 0.0, 9e-4)
    return Goodput.build(
        GoodputOptions(choose_drafters=choose),
        PolicyContext(costs=LatencyModels(TARGET, whole), capabilities=DrafterCapabilities(num_drafters=3)),
    )


@pytest.mark.parametrize(("helps", "wanted"), [(0.0, 1), (0.2, 3)])
def test_as_many_as_pay(helps: float, wanted: int) -> None:
    world = pool(helps)
    world.play(policy(), 600)
    assert np.median(world.asked[300:]) == wanted


def test_the_routing_chooses_where_the_policy_does_not() -> None:
    """The same pool, where one drafter pays and three drafters do not."""
    chosen, left = pool(0.0), pool(0.0)
    budgets = list[DraftBudget]()
    for world, choose in ((chosen, True), (left, False)):
        made = policy(choose)
        world.play(made, 300)
        budgets += [each for each in made.plan(BatchState(sequences(4))) if each.depth]
    assert {each.drafters is None for each in budgets} == {True, False}
    assert all(each.drafters is None for each in budgets[-4:]), "None leaves the number to the routing"


def test_rates_are_learned_for_each_number() -> None:
    made = NumDrafters(2)
    assert made.nearby == [2, 1]
    assert made.rate(1, 0.6) < made.rate(2, 0.6) == pytest.approx(0.6)
    budgets = {"s": DraftBudget(4, 4, drafters=1)}
    for _ in range(100):
        made.observe([Commit("s", 9, (1,) * 5, (0, 1, 2, 3), 14, 4)], budgets)
    assert made.rate(1, 0.6) > 0.9
    assert made.shifted(np.array([0.5]), 1, 0.6)[0] > 0.8
    assert made.shifted(np.array([0.5]), 2, 0.6)[0] == pytest.approx(0.5)


def test_one_drafter_is_no_pool() -> None:
    made = Goodput.build(GoodputOptions(), PolicyContext(costs=LatencyModels(TARGET, ForwardLatency(fixed=1e-4))))
    assert all(budget.drafters is None for budget in made.plan(BatchState(sequences(3))))
