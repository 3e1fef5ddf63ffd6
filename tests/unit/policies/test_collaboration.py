"""The theorems of CoS, the exact count of calls, and the choice of lengths by them."""

from __future__ import annotations

import itertools

import pytest

from cospec.policies.collaboration import LOOK_EVERY, Casting, Collaboration
from cospec.policies.theory import Process, acceptance_bound, alternate_factor, expected_tokens, naive_factor
from cospec.stats import RoundStats, RoundTimes
from cospec.types import Load

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


def watch(policy: Collaboration, costs: tuple[float, ...], alphas: tuple[float, ...], rounds: int = 40) -> None:
    """Let the policy see what calls cost and how often proposals are accepted."""
    stats = RoundStats(0, 1, 1, 0, 0, 0, 0, 1, RoundTimes(), 0.1)
    for number in range(rounds * LOOK_EVERY):
        for model, (cost, alpha) in enumerate(zip(costs, alphas, strict=True)):
            policy.timed(model, cost)
            policy.judged(model, number % 100 < 100 * alpha)
        policy.observe(stats, [])


def test_a_cheap_agreeable_model_proposes_much() -> None:
    policy = Collaboration(Casting((1, 1), (0, 1)), (0, 1), free=True)
    watch(policy, (1.0, 0.05), (0.5, 0.9))
    assert policy.casting.order == (1, 0)
    assert policy.casting.gammas[1] >= 4
    assert policy.casting.gammas[0] == 1
    assert policy.predicted(policy.casting) > policy.predicted(Casting((1, 1), (0, 1)))
    assert policy.plan(Load([])) == []


def test_equal_models_alternate_by_little() -> None:
    policy = Collaboration(Casting((1, 1), (0, 1)), (0, 1), free=True)
    watch(policy, (1.0, 1.0), (0.5, 0.5))
    assert policy.casting.gammas == (1, 1)
    assert policy.predicted(policy.casting) == pytest.approx(2 / 1.5, rel=0.1)


def test_what_is_given_stays() -> None:
    casting = Casting((2, 3), (1, 0))
    kept, pinned = (
        Collaboration(casting, (0, 1)),
        Collaboration(Casting((1, 1), (0, 1)), (0, 1), free=True, pinned=True),
    )
    for policy in (kept, pinned):
        watch(policy, (1.0, 0.05), (0.5, 0.9))
    assert kept.casting == casting
    assert pinned.casting.order == (0, 1)
    assert pinned.casting.gammas != (1, 1)
