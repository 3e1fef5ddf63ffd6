"""Step times by draft length: excesses come from steps of several lengths in one moment, and are forgotten in time."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.policies.latency.depth_correction import LONGEST, MOST, OUTLIER, DepthCorrection


def follow(made: DepthCorrection, steps: dict[int, tuple[int, float]], requests: int = 4) -> None:
    """One batch of steps: by draft length, how many there are and how many times as long as predicted they took."""
    depths = np.array([depth for depth, (count, _) in steps.items() for _ in range(count)])
    seconds = np.array([times for count, times in steps.values() for _ in range(count)])
    ones = np.ones(len(depths))
    made.follow((np.full(len(depths), requests), depths), seconds, ones, ones, ones)


def test_lengths_in_one_batch_keep_their_difference() -> None:
    made = DepthCorrection()
    for _ in range(40):
        follow(made, {0: (6, 0.9), 2: (100, 1.2), 3: (6, 1.5)})
    excess = made.excess(4)
    assert excess[2] - excess[0] == pytest.approx(0.3 / 1.2, rel=0.06)
    assert excess[3] - excess[2] == pytest.approx(0.3 / 1.2, rel=0.06)
    assert excess[2] == pytest.approx(0.0, abs=0.02), "what most steps take is the machine's speed"


def test_steps_of_one_length_show_the_speed_and_nothing_else() -> None:
    made = DepthCorrection()
    for _ in range(20):
        follow(made, {2: (100, 1.7)})
    assert not made.excess(4).any()
    assert made.excess(4).shape == (LONGEST + 1,)


def test_a_slow_machine_is_slow_for_every_length() -> None:
    made = DepthCorrection()
    follow(made, {0: (100, 1.7), 3: (100, 1.7)})
    assert made.excess(4) == pytest.approx(np.zeros(LONGEST + 1), abs=1e-12)


def test_a_length_that_was_not_run_takes_the_excess_of_drafts() -> None:
    made = DepthCorrection()
    for _ in range(40):
        follow(made, {0: (50, 1.0), 2: (50, 1.3)})
    excess = made.excess(4)
    assert excess[5] == pytest.approx(excess[2], rel=0.1)
    assert excess[5] - excess[0] == pytest.approx(0.3 / 1.15, rel=0.1)


def test_few_steps_are_not_believed_much() -> None:
    made = DepthCorrection()
    follow(made, {0: (200, 1.0), 1: (2, 1.3)})
    excess = made.excess(4)
    assert 0.0 < excess[1] - excess[0] < 0.2


def test_corrections_depend_on_the_number_of_requests() -> None:
    made = DepthCorrection()
    for _ in range(20):
        follow(made, {0: (50, 1.0), 1: (50, 1.4)}, requests=16)
    assert not made.excess(4).any()
    assert made.excess(31)[1] == made.excess(16)[1] > 0.1
    assert not made.excess(10**6).any()


def test_what_is_not_run_is_forgotten_in_time() -> None:
    made = DepthCorrection()
    for _ in range(10):
        follow(made, {0: (30, 1.0), 2: (30, 1.3)})
    before = made.excess(4)
    for _ in range(100):
        follow(made, {0: (100, 1.0)})
    assert np.abs(made.excess(4)).max() < 0.1 * np.abs(before).max()


def test_weights_of_outliers_and_excesses_are_bounded() -> None:
    quiet, stalled = DepthCorrection(), DepthCorrection()
    for made, times in ((quiet, OUTLIER), (stalled, 1e3)):
        follow(made, {0: (50, 1.0), 1: (49, 1.0), 2: (1, times)})
    assert stalled.excess(4).tolist() == pytest.approx(quiet.excess(4).tolist())
    for _ in range(50):
        follow(stalled, {0: (100, 1.0), 1: (5, OUTLIER)})
    assert stalled.excess(4).max() <= MOST
