"""Acceptance by level and by number of siblings: found where it differs, and nothing where only requests differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from cospec.core.types import Commit, DraftBudget
from cospec.policies.goodput.acceptance_rates import AcceptanceRates
from cospec.policies.goodput.level_rates import Fate, LevelRates, independent

DEPTH = 5
RISING = (0.5, 0.6, 0.7, 0.8, 0.8)


def seen(
    rates: LevelRates, levels: Sequence[float], mean: float, widths: tuple[int, ...] = (), drafts: int = 4000
) -> None:
    """Let drafts be verified whose levels are accepted with the chances ``levels``."""
    chance, fates = np.random.default_rng(0), defaultdict[Fate, list[float]](lambda: [0.0, 0.0])
    for _ in range(drafts):
        kept = int(np.cumprod(chance.random(len(levels)) < levels).sum())
        counts = fates[widths, kept, int(kept < len(levels))]
        counts[0], counts[1] = counts[0] + 1, counts[1] + mean
    rates.observe(fates, 1)


def test_each_position_has_its_own_rate() -> None:
    rates, constant = LevelRates(True, False), LevelRates(False, True)
    for each in (rates, constant):
        seen(each, RISING, 0.6)
    found = rates.acceptance(np.array([0.6]))[0, :DEPTH, 0]
    assert found == pytest.approx(RISING, abs=0.03)
    assert np.ptp(constant.acceptance(np.array([0.6]))[0, :DEPTH, 0]) == 0
    better = rates.acceptance(np.array([0.8]))[0, :DEPTH, 0]
    assert (better > found).all() and (better < 1).all(), "another request differs in its own rate"


def test_a_mixture_of_requests_is_no_effect_of_positions() -> None:
    """Later positions see more of the easy requests; accepted / judged there is far above that of the first."""
    rates = LevelRates(True, False)
    for own in (0.3, 0.9):
        seen(rates, (own,) * DEPTH, own)
    found = rates.acceptance(np.array([0.3, 0.9]))[:, :DEPTH, 0]
    assert found == pytest.approx(np.array([[0.3] * DEPTH, [0.9] * DEPTH]), abs=0.03)


def test_siblings_that_are_worse_than_independent() -> None:
    rates = LevelRates(False, True)
    assert rates.acceptance(np.array([0.6]))[0, 0] == pytest.approx(independent(np.array([0.6]))[0])
    seen(rates, (0.7,) * DEPTH, 0.6, widths=(2,) * DEPTH)
    chain, pairs, threes, _ = rates.acceptance(np.array([0.6]))[0, 0]
    assert chain == pytest.approx(0.6) and pairs == pytest.approx(0.7, abs=0.02)
    assert threes == pytest.approx(1 - 0.4**3), "no sample has three siblings"


def test_new_shapes_are_called_for_once() -> None:
    rates = LevelRates(True, False)
    rates.acceptance(np.array([0.6]))
    assert not rates.moved
    seen(rates, RISING, 0.6)
    assert rates.moved
    rates.acceptance(np.array([0.6]))
    assert not rates.moved


@pytest.mark.parametrize("known", [True, False])
def test_a_rate_is_that_of_first_choices(known: bool) -> None:
    """The first choice is right with 0.6, the second with 0.25 after it; without ranks, pairs look like one choice."""
    rates, chance = AcceptanceRates(levels=LevelRates(False, True)), np.random.default_rng(0)
    for _ in range(2000):
        ranks: list[int] = []
        while len(ranks) < 2 and (right := chance.random(2) < (0.6, 0.25)).any():
            ranks.append(int(right.argmax()))
        kept, own = len(ranks), tuple(ranks) if known else ()
        commit = Commit("s", 9, (1,) * (kept + 1), tuple(range(kept)), 9, 6, rejected=kept < 2, ranks=own)
        rates.observe([([commit], {"s": DraftBudget(2, 6, (2, 2))})])
    assert rates.overall == pytest.approx(0.6 if known else 0.7, abs=0.04)
    acceptance = rates.levels.acceptance(np.array([rates.overall]))[0, 0]
    assert acceptance[1] == pytest.approx(0.7, abs=0.04), "what is drafted is known in either case"
