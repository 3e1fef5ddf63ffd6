"""The controller: close to one that knows the rates, per sequence, quiet under load, and back when that is over."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import BatchState, Commit, DraftBudget, Request, RequestState
from cospec.policies.fixed import Fixed
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.goodput.controller_states import LONGEST_WAIT
from cospec.policies.goodput.draft_shapes import chains
from cospec.policies.goodput.exploration import TRIAL_STEPS
from cospec.policies.goodput.length_problem import LengthProblem
from cospec.policies.goodput.step_costs import StepCosts
from cospec.policies.latency.depth_correction import DepthCorrection
from cospec.policies.latency.step import LatencyModels, StepLatency
from cospec.policies.policy_build_context import PolicyContext
from cospec.sampling_params import SamplingParams
from harness.execution import CPU, FLAT, Rates, World, sequences, steady


def policy(
    costs: LatencyModels = CPU, capabilities: DrafterCapabilities = DrafterCapabilities(), **options: object
) -> Goodput:
    return Goodput.build(GoodputOptions.model_validate(options), PolicyContext(costs=costs, capabilities=capabilities))


class Oracle(Fixed):
    """Knows every rate before it plans."""

    horizon = 1

    def __init__(self, costs: LatencyModels, rates: Rates) -> None:
        super().__init__(0)
        self.rates, self.step = rates, 0
        self.cost = StepLatency(costs)
        self.problem = LengthProblem([chains(PolicyContext().longest)], StepCosts(self.cost))

    def plan(self, load: BatchState) -> list[DraftBudget]:
        lengths = [len(sequence.tokens) for sequence in load.ready]
        situation = self.problem.costs.inputs(load, lengths, None)
        self.step += 1
        return self.problem.per_sequence(self.rates(self.step - 1), situation)[1]

    def observe(self, stats: StepStats, commits: object) -> None:
        self.cost.observe(stats)


def depths(budgets: list[DraftBudget]) -> list[int]:
    return [budget.depth for budget in budgets]


class After:
    """True once a review has just been made and no other lengths are being tried.

    From one round to the next the plan lasts one round less, until the next review.
    """

    def __init__(self, made: Goodput) -> None:
        self.made, self.before = made, made.horizon

    def __call__(self) -> bool:
        before, self.before = self.before, self.made.horizon
        return self.made.horizon > max(before, TRIAL_STEPS)


def wandering(count: int, seed: int) -> Rates:
    """Domains of different rates, each sequence drifting and now and then jumping to another."""
    chance, domains = np.random.default_rng(seed), np.array([0.35, 0.6, 0.85])
    values, now = [], chance.choice(domains, count)
    for _ in range(1500):
        jump = chance.random(count) < 1 / 200
        now = np.where(jump, chance.choice(domains, count), now)
        values.append(np.clip(now + 0.03 * chance.standard_normal(count), 0.02, 0.98))
    return lambda step: values[step]


@pytest.mark.parametrize("burst", [1, 8])
@pytest.mark.parametrize("costs", [CPU, FLAT], ids=["cpu", "flat"])
@pytest.mark.parametrize("count", [1, 8, 32])
def test_close_to_one_that_knows_the_rates(costs: LatencyModels, count: int, burst: int) -> None:
    rates = wandering(count, count)
    known = World(costs, rates, count).play(Oracle(costs, rates), 1500)
    learned = World(costs, rates, count, burst=burst).play(policy(costs), 1500)
    assert learned >= 0.92 * known


def test_a_plan_lasts_until_the_review_and_a_probe_its_steps() -> None:
    """Rounds that are run as one are planned and learned from as if each had been by itself."""
    assert CPU.target is not None and CPU.draft is not None
    quick = LatencyModels(
        CPU.target.scaled(0.25), CPU.draft.scaled(0.25)
    )  # reviews come by the number of rounds, not by time
    steps, whole = policy(quick), policy(quick)
    slow, together = World(quick, steady(0.2, 0.9), 2), World(quick, steady(0.2, 0.9), 2, burst=8)
    assert slow.play(steps, 800) == together.play(whole, 800)
    assert slow.lengths == together.lengths and len({tuple(each) for each in slow.lengths}) > 3
    assert whole.acceptance.overall == steps.acceptance.overall
    assert (whole.acceptance.rates(["s0", "s1"]) == steps.acceptance.rates(["s0", "s1"])).all()
    assert whole.cost.target == steps.cost.target and whole.cost.draft == steps.cost.draft


def test_rounds_without_a_plan_are_learned_from() -> None:
    """Where no request wants drafts no plan is asked for."""
    made, found = policy(), []
    before = made.acceptance.overall
    missed = [Commit("s0", 200, (1,), (), 200, 2, rejected=True)]
    for step in range(3 * LONGEST_WAIT):
        made.observe(StepStats(step, 1, 3, 100, 2, 2, 0, 1, StepTimes(1e-4, 1e-3), 1e-3), missed)
        found.append(made.acceptance.overall)
    assert set(found[:LONGEST_WAIT]) == {before}, "not at once"
    assert before > found[LONGEST_WAIT] > found[-1], "but before too many are kept"


@pytest.mark.parametrize("mix", [(0.3, 0.95), (0.35, 0.6, 0.85), (0.1, 0.9)])
@pytest.mark.parametrize("costs", [CPU, FLAT], ids=["cpu", "flat"])
def test_a_length_for_each_beats_one_for_all_on_mixed_domains(costs: LatencyModels, mix: tuple[float, ...]) -> None:
    """Also the best of all lengths that one who knows the rates finds, or all but what finding out takes."""
    count = len(mix) * (16 // len(mix))
    rates = steady(*(mix * (count // len(mix))))
    each = World(costs, rates, count).play(policy(costs), 2400)  # probes have to find out who deserves drafts
    world = World(costs, rates, count)
    alike = world.play(policy(costs, per_sequence=False), 2400)
    assert each > alike
    assert np.mean([len(set(lengths)) == 1 for lengths in world.lengths]) > 0.95, "all but probes"
    known = max(World(costs, rates, count).play(Fixed(k), 100) for k in range(9))
    assert each > (1.04 if costs is CPU else 0.985) * known


def test_lengths_follow_rates_and_load() -> None:
    world = World(FLAT, steady(*([0.2, 0.9] * 8)), 16)
    world.play(policy(FLAT), 400)
    late = np.array(world.lengths[200:]).mean(axis=0)
    assert late[1::2].min() > late[::2].max() + 2
    alone, crowd = World(CPU, steady(0.7), 1), World(CPU, steady(*[0.7] * 64), 64)
    alone.play(policy(), 300)
    crowd.play(policy(), 300)
    assert np.mean(alone.lengths[100:]) > np.mean(crowd.lengths[100:]) + 2


def test_never_slower_than_none_under_load_or_with_a_bad_drafter() -> None:
    """The price of finding out is below two in a hundred."""
    for count, rate in ((64, 0.4), (1, 0.05), (16, 0.1)):
        world = World(CPU, steady(*[rate] * count), count)
        goodput = world.play(policy(), 1500)
        off = World(CPU, steady(*[rate] * count), count).play(policy(max_verified_tokens=0), 1500)
        assert goodput >= 0.98 * off, (count, rate)


def test_length_0_is_left_again() -> None:
    """A drafter that was useless and becomes good is found out by a probe, not at once but soon."""
    world = World(CPU, lambda step: np.array([0.02 if step < 500 else 0.9] * 4), 4)
    world.play(policy(), 1500)
    lengths = np.array(world.lengths)
    drafted = lengths.max(axis=1) > 0
    assert drafted[100:500].mean() < 0.1
    assert drafted[100:500].any(), "the policy made no probe"
    assert lengths[1200:].mean() > 2


def test_no_probes_where_no_rate_would_pay() -> None:
    world = World(CPU, steady(*[0.9] * 8), 8, other_prefill_tokens=1800)
    world.play(policy(max_step_seconds=1e-6), 400)
    assert np.max(world.lengths) == 0


def test_look_ups_are_drafted_longer_than_models() -> None:
    capabilities_of = DrafterCapabilities(), DrafterCapabilities(costless=True), DrafterCapabilities(single_pass=True)
    usual, free, heads = worlds = [
        World(CPU, steady(*[0.5] * 8), 8, capabilities=capabilities) for capabilities in capabilities_of
    ]
    for world in worlds:
        world.play(policy(capabilities=world.capabilities), 300)
    assert np.mean(free.lengths[100:]) > np.mean(usual.lengths[100:])
    assert np.mean(heads.lengths[100:]) > np.mean(usual.lengths[100:])


def test_trees_where_the_drafter_branches() -> None:
    made = policy(FLAT, DrafterCapabilities(trees=True))
    World(FLAT, steady(0.4, 0.4), 2).play(made, 200)
    budgets = [
        budget for _ in range(2) for budget in made.plan(BatchState(sequences(2)))
    ]  # one of the two plans may have no branch
    assert any(max(budget.widths, default=1) > 1 for budget in budgets)
    assert made.acceptance.overall == pytest.approx(0.4, abs=0.08), "levels are read as their tokens"


def test_bounds_of_a_round_are_kept() -> None:
    """Γ_max and T_max as a user sets them; without them more would be drafted, and for longer."""
    load = BatchState(sequences(8))

    def planned(**options: object) -> tuple[int, float]:
        """Draft tokens, and predicted seconds of the round."""
        made = policy(FLAT, DrafterCapabilities(), **options)
        budgets = made.plan(load)
        tokens, drafts = sum(budget.max_nodes for budget in budgets), sum(budget.depth > 0 for budget in budgets)
        longest, context = max(depths(budgets)), sum(len(sequence.tokens) for sequence in load.ready)
        return tokens, made.cost.predict(
            StepStats(0, 8, 8 + tokens, context, longest, tokens, 0, 8, StepTimes(), 0.0, drafts)
        )

    drafted, longest = planned()
    nothing, least = planned(max_verified_tokens=0)
    assert nothing == 0
    for most in (3, 11):
        assert 0 < planned(max_verified_tokens=most)[0] <= most < drafted
    short = (longest + least) / 2
    assert least < planned(max_step_seconds=short)[1] <= 1.001 * short < longest


def test_room_bounds_the_verified_tokens() -> None:
    for load in (
        BatchState(sequences(8), token_budget=12),
        BatchState(sequences(8), free_cache_tokens=12),
        BatchState(sequences(8), 100, token_budget=112),
    ):
        assert 0 < sum(budget.max_nodes for budget in policy(FLAT).plan(load)) <= 4
    assert sum(budget.max_nodes for budget in policy(FLAT).plan(BatchState(sequences(8)))) > 4


def test_a_long_text_about_to_end_is_not_fed_to_the_drafter() -> None:
    """Catching up with 4,000 tokens cannot pay in two rounds, and can in a hundred; nor for others like that one."""

    def some(left: int, *names: str) -> BatchState:
        prompt = (1,) * 4000
        return BatchState(
            [RequestState(Request(id, prompt, SamplingParams(max_tokens=left), 0), [*prompt, 1]) for id in names]
        )

    assert depths(policy().plan(some(1000, "a")))[0] > 0
    made = policy()
    assert depths(made.plan(some(3, "a", "b", "c"))) == depths(made.plan(some(3, "b", "c", "new"))) == [0] * 3


def test_prefill_disabling() -> None:
    """Most rounds without a draft: the draft cache is given back once, and drafting can return."""
    made, ready = policy(), sequences(2)
    rates = {"now": 0.9}
    world = World(CPU, lambda step: np.array([rates["now"]] * 2), 2)
    world.play(made, 50)
    assert np.mean(world.lengths[20:]) > 0
    rates["now"] = 0.0
    released: list[int] = []
    for step in range(400):
        world.play(made, 1)
        if any(budget.release for budget in made.plan(BatchState(ready))):
            released.append(step)
    assert released, "no sequence lost a cache"
    rates["now"] = 0.95
    world.play(made, 3000)
    assert np.mean(world.lengths[-100:]) > 1, "and none came back"


def test_a_decision_is_kept_while_nothing_moves() -> None:
    made, ready = policy(), sequences(8)
    first = made.plan(BatchState(ready))
    assert made.plan(BatchState(ready)) is first
    assert made.plan(BatchState(ready[:7])) is not first
    again = made.plan(BatchState(ready))
    made.observe(StepStats(0, 8, 508, 1600, 0, 0, 0, 8, StepTimes(), 0.6), [])
    assert made.plan(BatchState(ready, other_prefill_tokens=500)) is not again, (
        "a long execution_mode, for the prompts of others"
    )


def test_until_review_a_new_sequence_gets_the_overall_length() -> None:
    """Neither the longest nor the shortest length that others earned; and as many again get what as many got."""
    made = policy()
    world = World(CPU, steady(0.1, 0.6, 0.97), 3)
    world.play(made, 400)
    world.play(made, 400, until=After(made))
    before = sorted(depths(made.plan(BatchState(sequences(3)))))
    assert before[0] < before[1] < before[2]
    assert before[0] < made.plan(BatchState(sequences(4)))[3].depth < before[2]
    alone = made.plan(BatchState(sequences(1)))[0].depth
    made.plan(BatchState(sequences(4)[1:]))
    assert alone < made.plan(BatchState(sequences(4)[2:3]))[0].depth < before[2], "the one alone was a hard text"


def interrupted(kind: str) -> tuple[Goodput, list[int], list[int]]:
    """A policy that has just begun to run other lengths of that kind; the lengths that it decided, and those."""
    made = policy()
    world = World(CPU, steady(0.9, 0.9, 0.9, 0.9), 4)
    world.play(made, 400)
    made.plan(BatchState(sequences(1)))  # and so a length for one alone is known
    before = [made.horizon]

    def begun() -> bool:
        latest, before[0] = before[0], made.horizon
        if not made.horizon == TRIAL_STEPS < latest - 1 or len(world.lengths) < 2:
            return False
        decided, now = np.array(world.lengths[-2:])
        kinds = {"plain": (now == 0).all(), "other": (abs(now - decided) <= 1).all() and (now != decided).any()}
        return bool(kinds[kind])

    world.play(made, 4000, until=begun)
    assert made.horizon == TRIAL_STEPS, "other lengths were not tried"
    return made, world.lengths[-2], world.lengths[-1]


@pytest.mark.parametrize("kind", ["plain", "other"])
def test_interruptions_end_in_time_when_requests_come_and_go(kind: str) -> None:
    """Under load some sequence ends in nearly every round, and a probe must not take the decision's place."""
    made, decided, tried = interrupted(kind)
    ready = sequences(5)[1:]
    found = [depths(made.plan(BatchState(ready))) for _ in range(TRIAL_STEPS + 1)]
    assert decided != tried
    assert [each[:3] for each in found] == [tried[1:]] * (TRIAL_STEPS - 1) + [decided[1:]] * 2, (
        "the first one was before"
    )
    new = found[-1][3]
    assert new > 2, "a new sequence gets what suits the rate of all"
    if kind == "other":
        assert {each[3] for each in found} == {new}, "the new sequence is not part of the review"
    else:
        assert [each[3] for each in found[:-2]] == [0] * (TRIAL_STEPS - 1), (
            "a step without drafts has none for any request"
        )


def test_interruptions_end_at_once_when_the_load_changes_much() -> None:
    made, decided, _ = interrupted("plain")
    expected = made.gauges()["expected_goodput"]
    assert depths(made.plan(BatchState(sequences(1))))[0] >= max(decided)
    assert made.gauges()["expected_goodput"] == expected, "there was no other decision"
    assert made.horizon > TRIAL_STEPS


def test_where_nothing_is_drafted_nothing_is_for_those_that_come() -> None:
    """And nothing has to be decided for them; a load that is another altogether is decided on."""
    made = policy()
    world = World(CPU, steady(*[0.1] * 24), 24)
    world.play(made, 400)
    after, earlier = After(made), [0.0]

    def decided() -> bool:
        """Whether the review that was just made led to a decision."""
        before, earlier[0] = earlier[0], made.gauges()["expected_goodput"]
        return after() and not any(world.lengths[-1]) and earlier[0] != before > 0

    world.play(made, 2000, until=decided)
    expected, horizon = made.gauges()["expected_goodput"], made.horizon
    for first in range(1, 8):
        budgets = made.plan(BatchState(sequences(32)[first : first + 24]))
        assert not any(depths(budgets))
    assert made.gauges()["expected_goodput"] == expected and made.horizon == horizon
    made.observe(StepStats(0, 24, 24, 4800, 0, 0, 0, 24, StepTimes(), 0.3), [])
    assert made.plan(BatchState(sequences(32)[7:31])) is budgets, "nothing moved"
    assert made.horizon != horizon, "although a long round caused a review"
    made.plan(BatchState(sequences(2)))
    assert made.gauges()["expected_goodput"] != expected


class Uncorrected(DepthCorrection):
    """Believes what the parts say."""

    def follow(self, *observed: object) -> None: ...


def test_overhead_of_drafts_decides_whether_drafts_pay() -> None:
    """Judging and committing count, and the parts do not show them: who believes in the parts drafts at a loss."""
    worlds = [World(CPU, steady(*[0.7] * 16), 16, overhead=8e-5) for _ in range(3)]
    policies = policy(max_verified_tokens=0, probe_share=0.0), policy(), policy()
    policies[2].cost.correction = Uncorrected()
    off, knows, believes = (world.play(made, 3000) for world, made in zip(worlds, policies, strict=True))
    assert knows > 0.98 * off
    assert believes < 0.95 * off


def test_lengths_follow_a_load_that_grows_one_by_one() -> None:
    """No newcomer is many more than there were, and there is no review in between."""
    made = policy()
    world = World(CPU, steady(0.7), 1)
    world.play(made, 400)
    world.play(made, 400, until=After(made))
    found = [depths(made.plan(BatchState(sequences(n)))) for n in range(1, 33)]
    afresh = policy(prior=made.acceptance.overall)
    assert found[0][0] > 2
    assert max(found[-1]) <= depths(afresh.plan(BatchState(sequences(32))))[0] + 1 < found[0][0]


def test_a_text_does_not_inherit_the_length_of_the_one_before() -> None:
    """Requests come one after the other, and end before there is a review; the last of them was a hard text."""
    made = policy()
    world = World(CPU, steady(0.85), 1)
    world.play(made, 400)
    world.play(made, 400, until=After(made))
    easy = depths(made.plan(BatchState(sequences(1))))[0]
    World(CPU, steady(0.3), 1, seed=1).play(made, 16)
    made.observe(StepStats(0, 1, 1, 200, 0, 0, 0, 1, StepTimes(), 0.3), [])  # a long round, and so a review
    hard = depths(made.plan(BatchState(sequences(1))))[0]
    assert hard < easy
    assert hard < depths(made.plan(BatchState(sequences(2)[1:])))[0] <= easy
