"""Rates from judgements: unbiased, drawn to the rate of all requests, and back to the prior without observations."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.core.types import Commit, DraftBudget, FinishReason
from cospec.policies.goodput.acceptance_rates import FORGET_AFTER, AcceptanceRates


def judged(id: str, kept: int, drafted: int, finish: FinishReason | None = None) -> Commit:
    return Commit(id, 10, (1,) * (kept + 1), tuple(range(kept)), 11, drafted, finish=finish, rejected=kept < drafted)


def drawn(chance: np.random.Generator, id: str, alpha: float, k: int) -> Commit:
    kept = int(np.cumprod(chance.random(k) < alpha).sum())
    return judged(id, kept, k)


def rate(made: AcceptanceRates, id: str) -> float:
    return float(made.rates([id])[0])


def test_the_rate_is_that_of_judged_tokens() -> None:
    """Accepted / proposed would read .39 at a true .7 with five tokens."""
    made, chance = AcceptanceRates(), np.random.default_rng(0)
    found = []
    for step in range(3000):
        made.observe([([drawn(chance, "s", 0.7, 5)], {})])
        if step > 200:
            found.append(made.overall)
    assert np.mean(found) == pytest.approx(0.7, abs=0.02)


def test_sequences_differ_and_new_ones_start_at_everybodys() -> None:
    made, chance = AcceptanceRates(), np.random.default_rng(1)
    for _ in range(100):
        made.observe([([drawn(chance, "low", 0.2, 3), drawn(chance, "high", 0.95, 3)], {})])
    assert rate(made, "low") < 0.4 < 0.8 < rate(made, "high")
    assert rate(made, "new") == pytest.approx(made.overall)


def test_what_is_not_seen_fades() -> None:
    made = AcceptanceRates(prior=0.6)
    for _ in range(100):
        made.observe([([judged("s", 0, 4), judged("other", 4, 4)], {})])
    low = rate(made, "s")
    for _ in range(1000):
        made.observe([([judged("other", 4, 4)], {})])
    assert rate(made, "s") > low + 0.3, "towards the rate of all requests"
    for _ in range(5000):
        made.observe([([Commit("other", 10, (1,), (), 11)], {})])
    assert made.overall == pytest.approx(0.6, abs=0.01)
    assert rate(made, "s") == pytest.approx(0.6, abs=0.01)


def test_levels_of_a_tree_count_their_tokens() -> None:
    made, chance = AcceptanceRates(), np.random.default_rng(2)
    given = {"s": DraftBudget(3, 14, (2, 2, 2))}
    found = []
    for step in range(2000):
        kept = int(np.cumprod((chance.random((3, 2)) < 0.5).any(axis=1)).sum())
        made.observe([([Commit("s", 10, (1,) * (kept + 1), tuple(range(kept)), 11, 14, rejected=kept < 3)], given)])
        if step > 300:
            found.append(made.overall)
    assert np.mean(found) == pytest.approx(0.5, abs=0.03)


def test_nothing_is_kept_of_sequences_that_ended() -> None:
    made = AcceptanceRates()
    for n in range(200):
        made.observe([([judged(f"s{n}", 2, 1)], {})])
    assert made.tracked == 200
    made.observe([([judged(f"s{n}", 0, 2, FinishReason.STOP) for n in range(200)], {})])
    assert made.tracked == 0
    assert made.rates([f"s{n}" for n in range(200)]) == pytest.approx(np.full(200, made.overall))


def test_sequences_without_further_commits_are_forgotten() -> None:
    made = AcceptanceRates()
    for n in range(3 * FORGET_AFTER):
        made.observe([([judged(f"aborted {n}", 2, 1), judged("goes on", 1, 2)], {})])
    assert made.tracked <= 2 * FORGET_AFTER
    assert made.rates(["goes on"])[0] < made.overall, "what is known of those that go on stays"
