"""Ways are tried by turns and judged by what they took."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.policies.bandit import LOSSES, START, Bandit


def play(trials: Bandit, times: list[float], rounds: int, stream_kind: float = 0.0, seed: int = 0) -> float:
    """Seconds over those of the best way, for as many tokens; a round is four tokens, and one of way 0."""
    chance, seconds, tokens, before = np.random.default_rng(seed), 0.0, 0, -1
    for _ in range(rounds):
        way = trials.now
        gained = 4 if way else 1
        took = times[way] * gained * float(np.exp(stream_kind * chance.standard_normal()))
        trials.ran(took, gained, way == before)
        seconds, tokens, before = seconds + took, tokens + gained, way
    return seconds / (tokens * min(times) * float(np.exp(stream_kind**2 / 2)))


WRONG = [1.0, 0.3, 0.4, 0.5, 0.4]  # predicted of every way below


@pytest.mark.parametrize("times", [[1.0, 0.9, 0.5, 0.7, 0.8], [1.0, 1.2, 1.3, 1.5, 1.1], [1.0, 0.6, 0.7, 0.8, 0.5]])
def test_the_quickest_is_found_though_predictions_are_wrong(times: list[float]) -> None:
    trials = Bandit(len(times), 1)
    trials.expect(WRONG)
    play(trials, times, 300)
    assert times[trials.best] == min(times)


@pytest.mark.parametrize("seed", range(5))
def test_noise_costs_little(seed: int) -> None:
    """Rounds that take half or twice the time; no way that proposes is worth it."""
    times, trials = [1.0, 1.1, 1.2, 1.3, 1.15], Bandit(5, 1)
    trials.expect(WRONG)
    play(trials, times, 300, 0.4, seed)
    assert play(trials, times, 3000, 0.4, seed + 1) < 1.03


def test_what_trials_lose_is_bounded() -> None:
    times, trials = [1.0] + [1.5] * 9, Bandit(10, 1)
    trials.expect([1.0] + [0.2] * 9)
    lost = play(trials, times, 2000) - 1
    assert trials.best == 0
    assert lost < LOSSES + (START + 60) / 2000


def test_what_is_expected_to_be_quicker_is_tried_though_trials_have_lost() -> None:
    """After losses that use up what trials may lose, predictions that come true are still followed."""
    times, trials = [1.0, 1.4, 0.8, 0.5], Bandit(4, 1)
    trials.expect([1.0, 0.3, 0.8, 1.2])
    play(trials, times, 40)
    trials._lost = 1000.0
    trials.expect([1.0, 1.4, 0.8, 0.5])
    play(trials, times, 40)
    assert trials.best == 3


def test_a_change_is_noticed() -> None:
    times, trials = [1.0, 0.5, 0.8], Bandit(3, 1)
    trials.expect([1.0, 0.5, 0.8])
    play(trials, times, 300)
    assert trials.best == 1
    trials.expect([1.0, 1.3, 0.8])
    play(trials, [1.0, 1.6, 0.8], 300)
    assert trials.now == 2


def test_one_disturbed_round_changes_nothing() -> None:
    trials = Bandit(3, 1)
    trials.expect([1.0, 0.5, 0.8])
    play(trials, [1.0, 0.5, 0.8], 300)
    trials.ran(500.0, 4, True)
    assert trials.best == 1


def test_the_same_times_give_the_same_choice() -> None:
    first, second = Bandit(5, 1), Bandit(5, 1)
    for trials in (first, second):
        trials.expect(WRONG)
        play(trials, [1.0, 0.9, 0.5, 0.7, 0.8], 120, 0.4)
    assert (first.now, first.best) == (second.now, second.best)
