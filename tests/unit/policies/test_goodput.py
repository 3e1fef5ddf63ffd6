"""The controller: close to one that knows the rates, per sequence, quiet under load, and back when that is over."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.params import SamplingParams
from cospec.policies.depth_correction import DepthCorrection
from cospec.policies.fixed import Fixed
from cospec.policies.goodput import LATE, Goodput, GoodputOptions
from cospec.policies.residents import ABSENT, Residents
from cospec.policies.round_cost import Costs
from cospec.policies.setting import PolicySetting
from cospec.stats import RoundStats, RoundTimes
from cospec.types import Budget, Commit, Finish, Load, Offer, Request, Sequence
from harness.rounds import CPU, FLAT, Rates, World, sequences, steady


def policy(costs: Costs = CPU, offer: Offer = Offer(), **options: object) -> Goodput:
    return Goodput.build(GoodputOptions(**options), PolicySetting(costs=costs, offer=offer))  # type: ignore[arg-type]


class Oracle(Goodput):
    """Knows every rate before it plans."""

    lasts = 1

    def __init__(self, options: GoodputOptions, setting: PolicySetting, rates: Rates) -> None:
        super().__init__(options, setting)
        self._true, self._step = rates, 0

    def plan(self, load: Load) -> list[Budget]:
        lengths = [len(sequence.tokens) for sequence in load.ready]
        situation = self._problem.situation(load, lengths, None)
        self._step += 1
        return self._problem.each(self._true(self._step - 1), situation)[1]

    def observe(self, stats: RoundStats, commits: object) -> None:
        self.cost.observe(stats)


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
def test_close_to_one_that_knows_the_rates(costs: Costs, count: int, burst: int) -> None:
    rates = wandering(count, count)
    oracle = Oracle(GoodputOptions(), PolicySetting(costs=costs), rates)
    known = World(costs, rates, count).play(oracle, 1500)
    learned = World(costs, rates, count, burst=burst).play(policy(costs), 1500)
    assert learned >= 0.92 * known


def test_a_plan_lasts_until_the_next_look_and_a_probe_no_longer_than_it_is_meant_to() -> None:
    """Rounds that are run as one are planned and learned from as if each had been by itself."""
    assert CPU.target is not None and CPU.draft is not None
    quick = Costs(CPU.target.scaled(0.25), CPU.draft.scaled(0.25))  # looks come by the number of rounds, not by time
    steps, whole = policy(quick), policy(quick)
    slow, together = World(quick, steady(0.2, 0.9), 2), World(quick, steady(0.2, 0.9), 2, burst=8)
    assert slow.play(steps, 800) == together.play(whole, 800)
    assert slow.lengths == together.lengths and len({tuple(each) for each in slow.lengths}) > 3
    assert whole.acceptance._counts == steps.acceptance._counts
    assert whole.cost.target == steps.cost.target and whole.cost.draft == steps.cost.draft


def test_rounds_that_nobody_plans_are_learned_from_all_the_same() -> None:
    """Where no request wants drafts no plan is asked for."""
    made = policy()
    for step in range(1000):
        made.observe(RoundStats(step, 1, 1, 100, 0, 0, 0, 1, RoundTimes(0.0, 1e-3), 1e-3), [])
    assert len(made._seen) <= LATE


@pytest.mark.parametrize("mix", [(0.3, 0.95), (0.35, 0.6, 0.85), (0.1, 0.9)])
@pytest.mark.parametrize("costs", [CPU, FLAT], ids=["cpu", "flat"])
def test_a_length_for_each_beats_one_for_all_on_mixed_domains(costs: Costs, mix: tuple[float, ...]) -> None:
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
    drafted = (lengths > 0).any(axis=1)
    assert drafted[100:500].mean() < 0.1
    assert drafted[100:500].any(), "nobody looks"
    assert lengths[1200:].mean() > 2


def test_no_probes_where_no_rate_would_pay() -> None:
    world = World(CPU, steady(*[0.9] * 8), 8, catching_up=1800)
    world.play(policy(max_round_seconds=1e-6), 400)
    assert np.max(world.lengths) == 0


def test_look_ups_are_drafted_longer_than_models() -> None:
    offers = Offer(), Offer(free=True), Offer(at_once=True)
    usual, free, heads = worlds = [World(CPU, steady(*[0.5] * 8), 8, offer=offer) for offer in offers]
    for world in worlds:
        world.play(policy(offer=world.offer), 300)
    assert np.mean(free.lengths[100:]) > np.mean(usual.lengths[100:])
    assert np.mean(heads.lengths[100:]) > np.mean(usual.lengths[100:])


def test_trees_where_the_drafter_branches() -> None:
    made = policy(FLAT, Offer(trees=True))
    World(FLAT, steady(0.4, 0.4), 2).play(made, 200)
    budgets = [budget for _ in range(2) for budget in made.plan(Load(sequences(2)))]  # one of the two may look at none
    assert any(max(budget.widths, default=1) > 1 for budget in budgets)
    assert made.acceptance.everybody == pytest.approx(0.4, abs=0.08), "levels are read as their tokens"


def test_bounds_of_a_round_are_kept() -> None:
    """Γ_max and T_max as a user sets them; without them more would be drafted, and for longer."""
    load = Load(sequences(8))
    free = policy(FLAT)
    drafted = sum(budget.max_nodes for budget in free.plan(load))
    least = policy(FLAT, max_verified_tokens=0)
    least.plan(load)
    for most in (0, 3, 11):
        planned = sum(budget.max_nodes for budget in policy(FLAT, max_verified_tokens=most).plan(load))
        assert 0 < planned <= most < drafted or planned == most == 0
    assert free._choice is not None and least._choice is not None
    short = (free._choice.seconds + least._choice.seconds) / 2
    bound = policy(FLAT, max_round_seconds=short)
    bound.plan(load)
    assert bound._choice is not None
    assert least._choice.seconds < bound._choice.seconds <= short < free._choice.seconds


def test_room_bounds_the_verified_tokens() -> None:
    for load in (Load(sequences(8), tokens=12), Load(sequences(8), room=12), Load(sequences(8), 100, tokens=112)):
        assert 0 < sum(budget.max_nodes for budget in policy(FLAT).plan(load)) <= 4
    assert sum(budget.max_nodes for budget in policy(FLAT).plan(Load(sequences(8)))) > 4


def test_a_long_text_about_to_end_is_not_fed_to_the_drafter() -> None:
    """Catching up with 4,000 tokens cannot pay in two rounds, and can in a hundred."""

    def one(left: int) -> Sequence:
        prompt = (1,) * 4000
        return Sequence(Request("s", prompt, SamplingParams(max_tokens=left), 0), [*prompt, 1])

    assert policy().plan(Load([one(3)]))[0].depth == 0
    assert policy().plan(Load([one(1000)]))[0].depth > 0


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
        if any(budget.release for budget in made.plan(Load(ready))):
            released.append(step)
    assert released, "nobody lost a cache"
    rates["now"] = 0.95
    world.play(made, 3000)
    assert np.mean(world.lengths[-100:]) > 1, "and none came back"


def test_a_decision_is_kept_while_nothing_moves() -> None:
    made, ready = policy(), sequences(8)
    first = made.plan(Load(ready))
    assert made.plan(Load(ready)) is first
    assert made.plan(Load(ready[:7])) is not first
    again = made.plan(Load(ready))
    made.observe(RoundStats(0, 8, 508, 1600, 0, 0, 0, 8, RoundTimes(), 0.6), [])
    assert made.plan(Load(ready, catching_up=500)) is not again, "a long round, for the prompts of others"


def test_a_new_sequence_gets_what_suits_everybodys_rate_until_the_next_look() -> None:
    """Neither the longest nor the shortest length that others earned; and as many again get what as many got."""
    made = policy()
    World(CPU, steady(0.1, 0.6, 0.97), 3).play(made, 400)
    made._decided, made._since, made._seen, made._unread = None, 0.0, [], 0
    before = sorted(budget.depth for budget in made._budgets)
    assert before[0] < before[1] < before[2]
    assert before[0] < made.plan(Load(sequences(4)))[3].depth < before[2]
    alone = made.plan(Load(sequences(1)))[0].depth
    made.plan(Load(sequences(4)[1:]))
    assert alone < made.plan(Load(sequences(4)[2:3]))[0].depth < before[2], "the one alone was a hard text"


def interrupted(length: int) -> list[list[int]]:
    """Lengths of four plans: all had four tokens and get ``length`` for a short time; one sequence comes anew."""
    made = policy()
    World(CPU, steady(0.9, 0.9, 0.9, 0.9), 4).play(made, 400)
    made.learn()
    drafted = [Budget(4, 4)] * 4
    made._decided, made._brief = (drafted, dict(zip(made._ids, drafted, strict=True))), 3
    made._take([Budget(length, length)] * 4)
    ready = sequences(5)
    return [[budget.depth for budget in made.plan(Load(ready[1:]))] for _ in range(4)]


@pytest.mark.parametrize("length", [0, 2])
def test_what_interrupts_a_decision_ends_in_its_time_also_where_others_come_and_go(length: int) -> None:
    """Under load some sequence ends in nearly every round, and a probe must not take the decision's place."""
    lengths = interrupted(length)
    assert [each[:3] for each in lengths] == [[length] * 3] * 2 + [[4] * 3] * 2, "three rounds, one of which was before"
    assert all(each[3] > 2 for each in lengths[2:])
    if length:
        assert all(each[3] > 2 for each in lengths[:2]), "the new one is not part of the probe"
    else:
        assert lengths[0][3] == lengths[1][3] == 0, "a round without drafts is one for everybody"


def test_where_nothing_is_drafted_nothing_is_for_those_that_come() -> None:
    """And nothing has to be decided for them; a load that is another altogether is decided on."""
    made = policy()
    World(CPU, steady(*[0.1] * 24), 24).play(made, 400)
    made._decided, made._brief = None, 0
    made._take([Budget()] * 24)
    choice = made._choice
    for first in range(1, 8):
        assert not any(budget.depth for budget in made.plan(Load(sequences(32)[first : first + 24])))
    assert made._choice is choice
    made.plan(Load(sequences(2)))
    assert made._choice is not choice


class Uncorrected(Goodput):
    """Believes what the parts say."""

    def learn(self) -> None:
        super().learn()
        self.cost.correction = DepthCorrection()


def test_what_drafts_cost_beside_their_parts_decides_whether_they_pay() -> None:
    """Judging and committing count, and the parts do not show them: who believes in the parts drafts at a loss."""
    worlds = [World(CPU, steady(*[0.7] * 16), 16, beside=8e-5) for _ in range(3)]
    off, knows, believes = (
        world.play(made, 3000)
        for world, made in zip(
            worlds,
            [
                policy(max_verified_tokens=0, probe_share=0.0),
                policy(),
                Uncorrected(GoodputOptions(), PolicySetting(costs=CPU, offer=Offer())),
            ],
            strict=True,
        )
    )
    assert knows > 0.98 * off
    assert believes < 0.95 * off


def test_lengths_follow_a_load_that_grows_one_by_one() -> None:
    """No newcomer is many more than there were, and there is no look in between."""
    made = policy()
    World(CPU, steady(0.7), 1).play(made, 400)
    made._decided, made._since, made._seen, made._unread = None, 0.0, [], 0
    alone = made._budgets[0].depth
    found = [made.plan(Load(sequences(n))) for n in range(1, 33)]
    afresh = policy()
    afresh.acceptance = made.acceptance
    assert alone == found[0][0].depth > 2
    assert max(budget.depth for budget in found[-1]) <= afresh.plan(Load(sequences(32)))[0].depth + 1 < alone


def test_a_text_does_not_inherit_the_length_of_the_one_before() -> None:
    """Requests come one after the other, and end before there is a look; the last of them was a hard text."""
    made = policy()
    World(CPU, steady(0.85), 1).play(made, 400)
    easy = made._budgets[0].depth
    World(CPU, steady(0.3), 1, seed=1).play(made, 16)
    made.learn()
    made._age, made._since = 1000, 1.0
    hard = made.plan(Load(sequences(1)))[0].depth
    made._decided, made._since, made._seen, made._unread = None, 0.0, [], 0
    assert hard < easy
    assert hard < made.plan(Load(sequences(2)[1:]))[0].depth <= easy


def test_finished_sequences_are_forgotten() -> None:
    made = policy()
    World(CPU, steady(0.5, 0.5), 2).play(made, 10)
    ends = [Commit(f"s{n}", 200, (1,), (), 200, finish=Finish.STOP) for n in range(2)]
    made.observe(RoundStats(0, 2, 2, 400, 0, 0, 0, 2, RoundTimes(), 1e-3), ends)
    made.learn()
    assert not made.residents._all
    assert not made.acceptance._counts


def test_drafters_caches_of_sequences_that_were_aborted_are_not_kept_account_of() -> None:
    residents = Residents(0.9)
    for n in range(3 * ABSENT):
        residents.tick()
        residents.settle([f"aborted {n}", "goes on"], [Budget(2, 2)] * 2, [8, 8])
    assert len(residents._all) <= 2 * ABSENT and "goes on" in residents._all
