"""Figures for the metrics are read between rounds, and change no decision."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest

from cospec.plugins import Policy
from cospec.policies.choice import Choice
from cospec.policies.collaboration import Casting, Collaboration, Freedom
from cospec.policies.setting import PolicySetting
from cospec.registry import POLICIES
from cospec.stats import Call, RoundStats, RoundTimes
from cospec.types import Budget, Commit, Draft, Load, Speculation
from harness.rounds import CPU, World, sequences

ROUNDS = 300


class Scraped(Policy):
    """A policy that writes down its plans; with ``scrape`` the figures are read before and after each call."""

    def __init__(self, policy: Policy, scrape: bool) -> None:
        self._policy, self._scrape = policy, scrape
        self.plans: list[list[Budget]] = []

    def plan(self, load: Load) -> list[Budget]:
        self._read()
        self.plans.append(list(self._policy.plan(load)))
        self._read()
        return self.plans[-1]

    @property
    def lasts(self) -> int:
        return getattr(self._policy, "lasts", 1)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        return self._policy.trim(drafts)

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        self._policy.observe(stats, commits)
        self._read()

    def learn(self) -> None:
        self._policy.learn()

    def gauges(self) -> Mapping[str, float]:
        return self._policy.gauges()

    def _read(self) -> None:
        if self._scrape:
            first = dict(self._policy.gauges())
            assert first == dict(self._policy.gauges()), "reading twice gives the same"


def changing(step: int) -> np.ndarray:
    """Rates that rise and fall, so that a policy that learns has something to decide."""
    return np.array([0.3, 0.6, 0.95]) if step // 100 % 2 else np.full(3, 0.02)


def built(name: str) -> Policy:
    cls = POLICIES.load(name)
    policy: Policy = cls.build(cls.Options(), PolicySetting(costs=CPU))
    return policy


@pytest.mark.parametrize("name", list(POLICIES))
def test_metrics_change_no_decision(name: str) -> None:
    plain, scraped = (Scraped(built(name), scrape) for scrape in (False, True))
    rounds = ROUNDS // 3 if name == "milp" else ROUNDS
    for policy in (plain, scraped):
        World(CPU, changing, 3, noise=0.1, burst=4).play(policy, rounds)
    assert scraped.plans == plain.plans
    learns = POLICIES.load(name).learns
    assert (len({str(plan) for plan in plain.plans}) > 1) == learns, "there was something to decide"


class OneAsksForSlope(Scraped):
    """The first request asks for another policy than the others have."""

    def plan(self, load: Load) -> list[Budget]:
        first, *others = load.ready
        asking = replace(first.request, speculation=Speculation(policy="slope"))
        return super().plan(replace(load, ready=[replace(first, request=asking), *others]))


def test_metrics_change_no_decision_where_a_request_chooses_its_policy() -> None:
    plain, scraped = (OneAsksForSlope(Choice(built("goodput"), built), scrape) for scrape in (False, True))
    for policy in (plain, scraped):
        World(CPU, changing, 3, noise=0.1).play(policy, ROUNDS)
    assert scraped.plans == plain.plans
    first, second = ({plan[place].depth for plan in plain.plans} for place in (0, 1))
    assert len(first) > 1 and len(second) > 1


def test_metrics_change_no_casting_of_several_models() -> None:
    castings = []
    for scrape in (False, True):
        policy = Collaboration(Casting((1, 1), (0, 1)), range(2), Freedom(lengths=True, proposer=True))
        chance, found = np.random.default_rng(0), []
        for step in range(ROUNDS):
            if scrape:
                assert policy.gauges() == policy.gauges() and policy.costs == policy.costs
            budgets = policy.plan(Load(sequences(2)))
            found.append((policy.casting, budgets))
            for model in range(2):
                seconds = (1.0, 0.2)[model] * float(chance.uniform(1.0, 1.2))
                call = Call(2 * int(chance.integers(1, 4)), 2)
                policy.timed(model, call, seconds)
                policy.turned(model, call, seconds)
                policy.judged(model, bool(chance.random() < (0.9, 0.5)[model]))
            policy.ran(2, 0.01)
            times = RoundTimes(0.2, 1.0)
            policy.observe(RoundStats(step, 2, 2, 0, 0, 0, 0, 5, times, float(chance.uniform(1.2, 1.5))), [])
        castings.append(found)
    assert castings[0] == castings[1]
    assert len({casting for casting, _ in castings[0]}) > 1
