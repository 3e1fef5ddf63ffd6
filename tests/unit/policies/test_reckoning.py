"""What drafting takes beside its parts: learned from both kinds of rounds, and tried again after a while."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.policies.reckoning import MOST, ODD, Reckoning


def told(made: Reckoning, rounds: int, drafted: bool, times: float) -> None:
    """So many rounds that took ``times`` as long as predicted."""
    ones = np.ones(rounds)
    made.follow(ones == drafted, times * ones, ones, ones)


def test_the_share_is_what_both_kinds_differ_by() -> None:
    made = Reckoning()
    told(made, 200, True, 1.2)
    assert made.share == 0.0, "one kind alone tells nothing but the machine's speed"
    told(made, 200, False, 0.9)
    assert made.share == pytest.approx(0.25, rel=0.06)


def test_a_machine_that_is_slow_for_both_is_slow_and_no_more() -> None:
    made = Reckoning()
    told(made, 200, True, 1.7)
    told(made, 200, False, 1.7)
    assert made.share == pytest.approx(0.0, abs=1e-9)


def test_few_rounds_are_not_believed_much() -> None:
    made = Reckoning()
    told(made, 200, False, 1.0)
    told(made, 2, True, 1.3)
    assert 0 < made.share < 0.1


def test_it_is_tried_again_after_long() -> None:
    made = Reckoning()
    told(made, 60, True, 1.2)
    told(made, 60, False, 1.0)
    before = made.share
    told(made, 400, False, 1.0)
    assert 0.8 * before < made.share < before
    told(made, 8000, False, 1.0)
    assert made.share < 0.1 * before


def test_a_disturbed_round_counts_for_so_much_and_the_share_is_bounded() -> None:
    quiet, stalled = Reckoning(), Reckoning()
    for made, times in ((quiet, ODD), (stalled, 1e3)):
        told(made, 50, False, 1.0)
        told(made, 50, True, 1.0)
        told(made, 1, True, times)
    assert stalled.share == quiet.share < 0.1
    told(stalled, 2000, True, ODD)
    told(stalled, 200, False, 1.0)
    assert stalled.share == MOST
