"""The theorems of CoS, the exact count of calls, and the choice of lengths by them."""

from __future__ import annotations

import itertools

import pytest

from cospec.params import SamplingParams
from cospec.policies.collaboration import LOOK_EVERY, PROBE_EVERY, Casting, Collaboration, Freedom
from cospec.policies.cost import ForwardCost
from cospec.policies.theory import Process, acceptance_bound, alternate_factor, expected_tokens, naive_factor
from cospec.stats import Call, RoundStats, RoundTimes
from cospec.types import Load, Request, Sequence

ALPHAS = (0.0, 0.3, 0.7, 0.95, 1.0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_naive_form_is_theorem_3_1(alpha: float) -> None:
    for gamma, c in itertools.product((1, 2, 5), (0.05, 0.5, 1.0)):
        process = Process((alpha, 0.5), (gamma, 1), alternate=False)
        assert process.factor((c, 1.0)) == pytest.approx(naive_factor(alpha, gamma, c))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alternating_by_ones_takes_two_minus_alpha_calls(alpha: float) -> None:
    assert sum(Process((alpha, alpha), (1, 1)).calls_per_token()) == pytest.approx(2 - alpha)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alternating_is_never_slower(alpha: float) -> None:
    """CoS corollary 3.7."""
    for c in (0.05, 0.5, 1.0):
        assert Process((alpha, alpha), (1, 1)).factor((c, 1.0)) >= 1 - 1e-9
        assert alternate_factor(alpha, 1, c) >= 1 - 1e-9
        for gamma in (1, 3):
            assert alternate_factor(alpha, gamma, c) >= naive_factor(alpha, gamma, c)


def test_all_accepted_takes_one_call_a_token() -> None:
    for count in (2, 3, 4):
        assert sum(Process((1.0,) * count, (1,) * count).calls_per_token()) == pytest.approx(1)


def test_without_weight_it_is_speculative_decoding() -> None:
    for alternate in (True, False):
        target = Process((0.8, 0.5), (4, 1), members=(1,), alternate=alternate).calls_per_token()[1]
        assert target == pytest.approx(1 / expected_tokens(0.8, 5))


def test_the_bound() -> None:
    assert acceptance_bound([0.6, 0.4], 1) == 0.4


FREE = Freedom(lengths=True, proposer=True)


def watch(policy: Collaboration, costs: tuple[float, ...], alphas: tuple[float, ...], rounds: int = 40) -> None:
    """Let the policy see what calls cost, whatever their rows, and how often proposals are accepted."""
    stats = RoundStats(0, 1, 1, 0, 0, 0, 0, 1, RoundTimes(), 0.1)
    for number in range(rounds * LOOK_EVERY):
        for model, (cost, alpha) in enumerate(zip(costs, alphas, strict=True)):
            policy.timed(model, Call(1, 1), cost)
            policy.judged(model, number % 100 < 100 * alpha)
        policy.observe(stats, [])


def test_a_cheap_agreeable_model_proposes_much() -> None:
    policy = Collaboration(Casting((1, 1), (0, 1)), (0, 1), FREE)
    watch(policy, (1.0, 0.05), (0.5, 0.9))
    assert policy.casting.order == (1, 0)
    assert policy.casting.gammas[1] >= 4
    assert policy.casting.gammas[0] <= 1
    assert policy.predicted(policy.casting) > policy.predicted(Casting((1, 1), (0, 1)))
    assert policy.plan(Load([])) == []


def test_equal_models_alternate_by_little() -> None:
    policy = Collaboration(Casting((1, 1), (0, 1)), (0, 1), FREE)
    watch(policy, (1.0, 1.0), (0.5, 0.5))
    assert policy.casting.gammas == (1, 1)
    assert policy.casting.alternate
    assert policy.predicted(policy.casting) == pytest.approx(2 / 1.5, rel=0.1)


def test_what_is_given_stays() -> None:
    casting = Casting((2, 3), (1, 0))
    kept = Collaboration(casting, (0, 1))
    pinned = Collaboration(Casting((1, 1), (0, 1)), (0, 1), Freedom(lengths=True))
    for policy in (kept, pinned):
        watch(policy, (1.0, 0.05), (0.5, 0.9))
    assert kept.casting == casting
    assert pinned.casting.order == (0, 1)
    assert pinned.casting.gammas != (1, 1)


def sequences(count: int) -> list[Sequence]:
    return [Sequence(Request(str(n), (1, 2), SamplingParams(), 0), [1, 2], 1) for n in range(count)]


def read(policy: Collaboration, cost: ForwardCost, batch: int) -> None:
    """Every kind of call several times."""
    for model, rows, passes in itertools.product((0, 1), (1, 2, 4), (1, 3)):
        for _ in range(3):
            first = cost.seconds(0, rows * batch, batch)
            policy.timed(model, Call(rows * batch, batch, passes), first + (passes - 1) * cost.each(0, batch, batch))


def test_nobody_proposes_where_rows_are_dear() -> None:
    """One sequence's rows come with the pass, those of many cost as much as passes."""
    stats = RoundStats(0, 1, 1, 0, 0, 0, 0, 1, RoundTimes(), 0.1)
    for cost, proposes in ((ForwardCost(slopes=(0.05,), fixed=1.0), True), (ForwardCost(slopes=(1.0,)), False)):
        policy = Collaboration(Casting((1, 1), (0, 1)), (0, 1), FREE)
        policy.plan(Load(sequences(4)))
        read(policy, cost, 4)
        for _ in range(LOOK_EVERY):
            policy.observe(stats, [])
        assert policy.casting.proposes == proposes
        assert (policy.predicted(policy.casting) > 1.2) == proposes
        assert all(bool(budget.depth) == proposes for budget in policy.plan(Load(sequences(4))))


def test_turns_that_cost_much_make_proposals_longer() -> None:
    policy = Collaboration(Casting((1, 1), (0, 1)), (0, 1), FREE)
    watch(policy, (1.0, 0.5), (0.6, 0.6))
    before = policy.casting.gammas
    for _ in range(200):
        policy.ran(2, 10.0)
    watch(policy, (1.0, 0.5), (0.6, 0.6))
    assert sum(policy.casting.gammas) > sum(before) > 0


def test_silence_is_broken_now_and_then() -> None:
    policy = Collaboration(Casting((1, 1), (0, 1)), (0, 1), FREE)
    stats, spoken = RoundStats(0, 1, 1, 0, 0, 0, 0, 1, RoundTimes(), 0.1), 0
    policy.plan(Load(sequences(4)))
    read(policy, ForwardCost(slopes=(1.0,)), 4)
    for _ in range(LOOK_EVERY):
        policy.observe(stats, [])
    for _ in range(3 * PROBE_EVERY):
        spoken += policy.casting.proposes
        policy.observe(stats, [])
    assert spoken == 3


def test_prompts_do_not_count_as_calls() -> None:
    policy = Collaboration(Casting((1, 1), (0, 1)), (0, 1), FREE)
    policy.timed(0, Call(1, 1), 2.0)
    policy.timed(0, Call(200, 1), 50.0)
    for _ in range(LOOK_EVERY):
        policy.observe(RoundStats(0, 1, 1, 0, 0, 0, 0, 1, RoundTimes(), 0.1), [])
    assert policy.costs[0] == pytest.approx(2.0)


@pytest.mark.parametrize("alternate", [True, False])
def test_the_rows_of_a_round(alternate: bool) -> None:
    """With everything accepted: by ones in turn two rows a call; the naive form's scorer reads a whole proposal."""
    process = Process((1.0, 1.0), (1, 1) if alternate else (4, 1), alternate=alternate)
    rows = process.seconds_per_token(lambda model, rows, passes: rows + passes - 1)
    assert rows == pytest.approx(2.0)
    calls = process.seconds_per_token(lambda model, rows, passes: passes)
    assert calls == pytest.approx(sum(process.calls_per_token()))
