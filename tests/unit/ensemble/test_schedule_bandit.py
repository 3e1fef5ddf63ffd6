"""Arms are tried in turn and compared by their measured times."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.ensemble.schedule_bandit import REGRET_SHARE, REGRET_START, Bandit


def play(bandit: Bandit, times: list[float], rounds: int, stream_kind: float = 0.0, seed: int = 0) -> float:
    """Seconds over those of the best arm, for as many tokens; a round is four tokens, and one of arm 0."""
    chance, seconds, tokens, before = np.random.default_rng(seed), 0.0, 0, -1
    for _ in range(rounds):
        arm = bandit.current
        gained = 4 if arm else 1
        took = times[arm] * gained * float(np.exp(stream_kind * chance.standard_normal()))
        bandit.observe(took, gained, arm == before)
        seconds, tokens, before = seconds + took, tokens + gained, arm
    return seconds / (tokens * min(times) * float(np.exp(stream_kind**2 / 2)))


WRONG = [1.0, 0.3, 0.4, 0.5, 0.4]  # predicted of every arm below


@pytest.mark.parametrize("times", [[1.0, 0.9, 0.5, 0.7, 0.8], [1.0, 1.2, 1.3, 1.5, 1.1], [1.0, 0.6, 0.7, 0.8, 0.5]])
def test_the_quickest_is_found_though_predictions_are_wrong(times: list[float]) -> None:
    bandit = Bandit([0] * len(times), 1)
    bandit.predict(WRONG)
    play(bandit, times, 300)
    assert times[bandit.best] == min(times)


@pytest.mark.parametrize("seed", range(5))
def test_noise_costs_little(seed: int) -> None:
    """Rounds that take half or twice the time; no arm that proposes is worth it."""
    times, bandit = [1.0, 1.1, 1.2, 1.3, 1.15], Bandit([0] * 5, 1)
    bandit.predict(WRONG)
    play(bandit, times, 300, 0.4, seed)
    assert play(bandit, times, 3000, 0.4, seed + 1) < 1.03


def test_what_trials_lose_is_bounded() -> None:
    times, bandit = [1.0] + [1.5] * 9, Bandit([0] * 10, 1)
    bandit.predict([1.0] + [0.2] * 9)
    lost = play(bandit, times, 2000) - 1
    assert bandit.best == 0
    assert lost < REGRET_SHARE + (REGRET_START + 60) / 2000


def test_an_arm_predicted_to_be_quicker_is_tried_after_losses() -> None:
    """After losses that use up what bandit may lose, predictions that come true are still followed."""
    times, bandit = [1.0, 1.4, 0.8, 0.5], Bandit([0] * 4, 1)
    bandit.predict([1.0, 0.3, 0.8, 1.2])
    play(bandit, times, 40)
    bandit.regret = 1000.0
    bandit.predict([1.0, 1.4, 0.8, 0.5])
    play(bandit, times, 40)
    assert bandit.best == 3


@pytest.mark.parametrize(("kinds", "best"), [([0, 1, 1, 1, 1, 2], 5), ([0, 1, 1, 1, 1, 1], 0)])
def test_kinds_of_predictions_have_errors_of_their_own(kinds: list[int], best: int) -> None:
    """Four arms are slower than predicted, which says nothing about an arm of another kind."""
    bandit = Bandit(kinds, 1)
    bandit.predict([1.0, 0.6, 0.61, 0.62, 0.63, 0.78])
    play(bandit, [1.0, 0.97, 0.97, 0.97, 0.97, 0.8], 80)
    assert bandit.best == best


def test_a_change_is_noticed() -> None:
    times, bandit = [1.0, 0.5, 0.8], Bandit([0] * 3, 1)
    bandit.predict([1.0, 0.5, 0.8])
    play(bandit, times, 300)
    assert bandit.best == 1
    bandit.predict([1.0, 1.3, 0.8])
    play(bandit, [1.0, 1.6, 0.8], 300)
    assert bandit.current == 2


def test_one_disturbed_round_changes_nothing() -> None:
    bandit = Bandit([0] * 3, 1)
    bandit.predict([1.0, 0.5, 0.8])
    play(bandit, [1.0, 0.5, 0.8], 300)
    bandit.observe(500.0, 4, True)
    assert bandit.best == 1


def test_the_same_times_give_the_same_choice() -> None:
    first, second = Bandit([0] * 5, 1), Bandit([0] * 5, 1)
    for bandit in (first, second):
        bandit.predict(WRONG)
        play(bandit, [1.0, 0.9, 0.5, 0.7, 0.8], 120, 0.4)
    assert (first.current, first.best) == (second.current, second.best)
