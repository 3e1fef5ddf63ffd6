"""Figures for the metrics are read between rounds, and change no decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import BatchState, Commit, Draft, DraftBudget, SpeculationParams
from cospec.ensemble.proposer_policy import FixedSchedule, GoodputProposerPolicy, ScheduleOptions
from cospec.policies.latency.call_latency import ModelCall
from cospec.policies.policy_build_context import PolicyContext
from cospec.policies.requested_policy import RequestedPolicy
from cospec.registry import POLICIES
from harness.execution import CPU, World, sequences

MODES = 300


class Scraped(Policy):
    """A policy that writes down its plans; with ``scrape`` the figures are read before and after each call."""

    def __init__(self, policy: Policy, scrape: bool) -> None:
        self._policy, self._scrape = policy, scrape
        self.plans: list[list[DraftBudget]] = []

    def plan(self, load: BatchState) -> list[DraftBudget]:
        self._read()
        self.plans.append(list(self._policy.plan(load)))
        self._read()
        return self.plans[-1]

    @property
    def horizon(self) -> int:
        return getattr(self._policy, "horizon", 1)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        return self._policy.trim(drafts)

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
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
    policy: Policy = cls.build(cls.Options(), PolicyContext(costs=CPU))
    return policy


@pytest.mark.parametrize("name", list(POLICIES))
def test_metrics_change_no_decision(name: str) -> None:
    plain, scraped = (Scraped(built(name), scrape) for scrape in (False, True))
    rounds = MODES // 3 if name == "milp" else MODES
    for policy in (plain, scraped):
        World(CPU, changing, 3, stream_kind=0.1, burst=4).play(policy, rounds)
    assert scraped.plans == plain.plans
    learns = POLICIES.load(name).learns
    assert (len({str(plan) for plan in plain.plans}) > 1) == learns, "there was something to decide"


class OneAsksForSlope(Scraped):
    """The first request asks for another policy than the others have."""

    def plan(self, load: BatchState) -> list[DraftBudget]:
        first, *others = load.ready
        asking = replace(first.request, speculation=SpeculationParams(policy="slope"))
        return super().plan(replace(load, ready=[replace(first, request=asking), *others]))


def test_metrics_change_no_decision_with_a_policy_per_request() -> None:
    plain, scraped = (OneAsksForSlope(RequestedPolicy(built("goodput"), built), scrape) for scrape in (False, True))
    for policy in (plain, scraped):
        World(CPU, changing, 3, stream_kind=0.1).play(policy, MODES)
    assert scraped.plans == plain.plans
    first, second = ({plan[place].depth for plan in plain.plans} for place in (0, 1))
    assert len(first) > 1 and len(second) > 1


def test_metrics_change_no_casting_of_several_models() -> None:
    schedules = []
    for scrape in (False, True):
        policy = GoodputProposerPolicy(
            FixedSchedule((1, 1), (0, 1)), range(2), ScheduleOptions(lengths=True, proposer=True)
        )
        chance, found = np.random.default_rng(0), []
        for step in range(MODES):
            if scrape:
                assert policy.gauges() == policy.gauges() and policy.costs == policy.costs
            budgets = policy.plan(BatchState(sequences(2)))
            found.append((policy.proposer_schedule, budgets))
            for model in range(2):
                seconds = (1.0, 0.2)[model] * float(chance.uniform(1.0, 1.2))
                call = ModelCall(2 * int(chance.integers(1, 4)), 2)
                policy.observe_call(model, call, seconds)
                policy.observe_turn(model, call, seconds)
                policy.observe_acceptance(model, bool(chance.random() < (0.9, 0.5)[model]))
            policy.observe_step(2, 0.01)
            times = StepTimes(0.2, 1.0)
            policy.observe(StepStats(step, 2, 2, 0, 0, 0, 0, 5, times, float(chance.uniform(1.2, 1.5))), [])
        schedules.append(found)
    assert schedules[0] == schedules[1]
    assert len({proposer_schedule for proposer_schedule, _ in schedules[0]}) > 1
