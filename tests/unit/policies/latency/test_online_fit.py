"""Following a time model: its shape where rounds are run, what was measured where they are not."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.policies.latency.forward import Floats, ForwardLatency, LatencySample
from cospec.policies.latency.online_fit import MEASURED, OnlineFit

TRUE = ForwardLatency(context=2e-7, slopes=(5e-5, 3e-4), knees=(4.0,), sequence=8e-5, fixed=1e-3)


def rounds(cost: ForwardLatency, sequences: int, tokens: int, count: int = 8, passes: float = 1.0) -> Floats:
    row = (100.0 * sequences, tokens, sequences, cost.seconds(100 * sequences, tokens, sequences, passes), passes)
    return np.array([row] * count)


def off(cost: ForwardLatency, sequences: int, tokens: int) -> float:
    return cost.seconds(100 * sequences, tokens, sequences) / TRUE.seconds(100 * sequences, tokens, sequences)


def test_a_fit_that_is_right_stays_as_it_is() -> None:
    tracked = OnlineFit(TRUE)
    for _ in range(20):
        tracked.follow(rounds(TRUE, 2, 10))
    for sequences, tokens in ((1, 1), (1, 5), (8, 8), (8, 40), (8, 400)):
        assert off(tracked.cost, sequences, tokens) == pytest.approx(1.0)


def test_a_slower_machine_is_slower_also_for_rounds_that_are_not_run() -> None:
    tracked = OnlineFit(TRUE)
    for _ in range(40):
        tracked.follow(rounds(TRUE.scaled(1.5), 1, 5))
    for sequences, tokens in ((1, 1), (1, 5), (8, 8), (8, 40)):
        assert off(tracked.cost, sequences, tokens) == pytest.approx(1.5, rel=0.02)


def test_the_shape_is_learned_where_rounds_differ() -> None:
    """With a factor alone the marginal token keeps half of its true cost."""
    tracked = OnlineFit(ForwardLatency(2e-7, (5e-5, 1.5e-4), (4.0,), 8e-5, 1e-3))
    for _ in range(40):
        for sequences, tokens in ((1, 5), (4, 8), (4, 16), (8, 8)):
            tracked.follow(rounds(TRUE, sequences, tokens, 2))
    assert off(tracked.cost, 4, 24) == pytest.approx(1.0, rel=0.08), "beyond what was run"
    dearer = tracked.cost.tokens(16) - tracked.cost.tokens(8)
    assert dearer == pytest.approx(8 * 3e-4, rel=0.1)


def test_a_knee_that_was_not_measured_is_found() -> None:
    """Rounds without drafts and rounds with drafts decide whether drafts pay; the measured fit is a fifth off."""
    tracked = OnlineFit(ForwardLatency(2e-7, (0.0, 3e-4), (8.0,), 8e-5, 1.6e-3))
    for _ in range(60):
        for sequences, tokens in ((4, 4), (4, 12), (4, 12), (4, 13), (4, 16)):
            tracked.follow(rounds(TRUE, sequences, tokens, 2))
    for sequences, tokens in ((4, 4), (4, 12), (4, 16)):
        assert off(tracked.cost, sequences, tokens) == pytest.approx(1.0, rel=0.08)


def test_the_fit_follows_usual_rounds_of_a_machine_that_stalls() -> None:
    tracked, chance = OnlineFit(TRUE), np.random.default_rng(0)
    for _ in range(60):
        data = rounds(TRUE, 2, 10, 10)
        data[:, 3] *= np.where(chance.random(10) < 0.2, 3.0, 1.0)
        tracked.follow(data)
    assert off(tracked.cost, 2, 10) == pytest.approx(1.0, abs=0.06), "the mean is 1.4"


def test_calls_that_take_far_too_long_count_for_little() -> None:
    tracked = OnlineFit(TRUE)
    for _ in range(40):
        odd = rounds(TRUE, 2, 10, 20)
        odd[0, 3] *= 50
        tracked.follow(odd)
    assert off(tracked.cost, 2, 10) == pytest.approx(1.0, abs=0.12)


def test_the_fixed_time_of_a_draft_is_separated_from_its_steps() -> None:
    """Nothing of it is in the measured fit."""
    true = ForwardLatency(slopes=(2e-5,), sequence=8e-5, fixed=3e-5, start=3e-4)
    tracked = OnlineFit(ForwardLatency(slopes=(2e-5,), fixed=3e-5, start=1e-4))
    for _ in range(60):
        for drafts, passes in ((1, 1), (1, 4), (4, 2), (4, 4), (8, 1)):
            seconds = true.seconds(0, drafts, drafts, passes)
            tracked.follow(np.array([(0.0, drafts, drafts, seconds, passes)] * 2))
    for drafts, passes in ((1, 2), (4, 3), (8, 1)):
        found = tracked.cost.seconds(0, drafts, drafts, passes)
        assert found == pytest.approx(true.seconds(0, drafts, drafts, passes), rel=0.12)


def test_a_slow_moment_does_not_bend_the_shape() -> None:
    """Long rounds that met a slow machine say nothing about how they compare with short ones."""
    tracked = OnlineFit(TRUE, MEASURED)
    for turn in range(40):
        slow, kind = (1.6, (8, 40)) if turn % 2 else (1.0, (1, 4))
        tracked.follow(rounds(TRUE.scaled(slow), *kind, 60))
    shape = off(tracked.cost, 8, 40) / off(tracked.cost, 1, 4)
    assert shape == pytest.approx(1.0, abs=0.1), "1.6 where each kind keeps its measured time"


def test_a_step_that_was_measured_stays_where_it_is() -> None:
    """Rounds on one side of it, at another speed and a little off, say nothing about where the next row is dear."""
    true = ForwardLatency(1e-7, (3e-5, 5e-4, 5e-5), (6.0, 7.0), 3e-5, 1.2e-3)
    tracked = OnlineFit(true, MEASURED)
    for _ in range(60):
        for tokens in (4, 5, 6):
            data = rounds(true.scaled(1.3), 1, tokens, 3)
            data[:, 3] += 3e-5 * tokens
            tracked.follow(data)
    six, seven = (tracked.cost.seconds(100, tokens, 1) for tokens in (6, 7))
    assert seven - six > 0.8 * 1.3 * 5e-4
    assert tracked.cost.seconds(100, 6, 1) - tracked.cost.seconds(100, 4, 1) < 0.2 * (seven - six) + 6e-5 * 1.3


def test_a_step_that_was_measured_wrongly_is_made_smaller_by_rounds() -> None:
    """The fit holds six rows for dear; where rounds have four and six, they tell."""
    true = ForwardLatency(1e-7, (3e-5, 5e-4, 5e-5), (6.0, 7.0), 3e-5, 1.2e-3)
    tracked = OnlineFit(ForwardLatency(1e-7, (3e-5, 5e-4, 5e-5), (5.0, 6.0), 3e-5, 1.2e-3), MEASURED)
    for _ in range(60):
        for tokens in (4, 6):
            tracked.follow(rounds(true, 1, tokens, 4))
    cost, step = tracked.cost, 5e-4
    assert cost.seconds(100, 6, 1) - cost.seconds(100, 4, 1) < 0.75 * step, "measured as the whole of it"


def test_a_stalling_machine_is_no_reason_for_a_new_fit() -> None:
    """The rounds of a moment are poor teachers; only a fit that they refute gives way."""
    chance = np.random.default_rng(0)
    right, wrong = OnlineFit(TRUE, MEASURED), OnlineFit(ForwardLatency(2e-7, (3e-3,), (), 8e-5, 1e-4), MEASURED)
    for tracked in (right, wrong):
        for _ in range(12):
            for sequences, tokens in ((1, 1), (1, 4), (2, 8), (1, 6)):
                data = rounds(TRUE, sequences, tokens, 2)
                data[:, 3] *= np.exp(0.1 * chance.standard_normal(2)) * np.where(chance.random(2) < 0.3, 2.0, 1.0)
                tracked.follow(data)
        assert tracked.refit() == (tracked is wrong)


def test_a_machine_that_grew_slow_is_no_reason_to_forget_the_shape() -> None:
    """The level follows late, so that every call of the window took longer than predicted."""
    tracked, chance = OnlineFit(TRUE, MEASURED), np.random.default_rng(0)
    found = [rounds(TRUE, n, n * int(chance.integers(1, 9)), 1) for n in chance.integers(1, 4, 256).tolist()]
    slow = np.concatenate(found)
    slow[:, 3] *= np.exp(0.1 * chance.standard_normal(256))
    bent = slow.copy()
    slow[160:, 3] *= 1.4
    tracked.follow(slow)
    assert np.median(tracked.cost.errors([LatencySample(*row) for row in slow[160:].tolist()])) > 0.15
    assert not tracked.refit()
    bent[bent[:, 1] > 8, 3] *= 3.0
    tracked.follow(bent)
    assert tracked.refit(), "another shape is one"


def test_calls_with_a_predicted_time_of_0_are_learned_from() -> None:
    """A new fit of the few calls of a moment may say so of others."""
    tracked = OnlineFit(ForwardLatency(slopes=(0.0, 1e-4), knees=(64.0,)))
    many, few = LatencySample(200, 500, 1, 0.05), LatencySample(200, 3, 1, 3e-3)
    for _ in range(10):
        tracked.follow(np.array([many] * 4))
        tracked.follow(np.array([few] * 32))
    assert tracked.cost.predict(few) == pytest.approx(few.seconds, rel=0.5)
