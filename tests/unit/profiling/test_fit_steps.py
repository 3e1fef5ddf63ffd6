"""Time models from rounds: the mean is met where some rounds take much longer, and both parts are fitted separately."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.core.stats import StepStats, StepTimes
from cospec.policies.latency.forward import ForwardLatency
from cospec.profiling.fit_steps import MeasuredSteps, fit_steps, pace

TARGET = ForwardLatency(2e-7, (5e-5, 3e-4), (6.0,), 8e-5, 1e-3)
DRAFT = ForwardLatency(slopes=(3e-5,), sequence=8e-5, start=3e-4)


def served(count: int) -> list[MeasuredSteps]:
    """Rounds of 1 to 6 sequences with 0 to 4 draft tokens; every tenth takes three times as long."""
    rng, found = np.random.default_rng(0), []
    for step in range(count):
        n, k = int(rng.integers(1, 7)), int(rng.integers(0, 5))
        slow = 3.0 if step % 10 == 0 else 1.0
        target = slow * TARGET.seconds(100 * n, n * (1 + k), n)
        draft = slow * DRAFT.seconds(0, n, n, k) if k else 0.0
        times = StepTimes(draft, target)
        stats = StepStats(step, n, n * (1 + k), 100 * n, k, n * k, 0, n, times, draft + target, n if k else 0)
        found.append(MeasuredSteps(stats))
    return found


def test_totals_are_met() -> None:
    rounds = served(600)
    target, draft = fit_steps(rounds, rounds)
    stats = [one.stats for one in rounds]
    verified = sum(target.seconds(s.context_tokens, s.batched_tokens, s.sequences) for s in stats)
    drafted = sum(draft.seconds(s.context_tokens, s.proposed / s.depth, s.drafts, s.depth) for s in stats if s.depth)
    assert verified == pytest.approx(sum(s.times.target for s in stats))
    assert drafted == pytest.approx(sum(s.times.draft for s in stats))
    assert target.seconds(300, 3, 3) / target.seconds(300, 15, 3) == pytest.approx(
        TARGET.seconds(300, 3, 3) / TARGET.seconds(300, 15, 3), rel=0.1
    )


def test_texts_that_were_new_to_the_drafter_do_not_count() -> None:
    rounds = served(300)
    fed = [MeasuredSteps(one.stats, fed=True) for one in served(300)]
    assert fit_steps([*rounds, *fed], rounds)[1].seconds(0, 2, 2, 3) == pytest.approx(
        fit_steps(rounds, rounds)[1].seconds(0, 2, 2, 3), rel=1e-6
    )


def test_the_pace_depends_on_slow_moments_and_not_on_the_load() -> None:
    rounds = served(600)
    costs = fit_steps(rounds, rounds)
    found = pace(rounds, costs)
    assert sum(seconds * factor for seconds, factor in found) == pytest.approx(sum(seconds for seconds, _ in found))
    factors = np.array([factor for _, factor in found])
    assert np.argsort(factors)[-60:].min() % 10 == 0 and set(np.argsort(factors)[-60:] % 10) == {0}
    assert np.median(factors[::10]) / np.median(np.delete(factors, slice(0, 600, 10))) == pytest.approx(3, rel=0.1)


def test_a_pace_needs_no_draft_times_where_nothing_was_drafted() -> None:
    rounds = served(300)
    costs = fit_steps(rounds, rounds)
    alone = [one for one in rounds if not one.stats.depth]
    assert len(pace(alone, costs)) == len(alone)


def test_the_shape_comes_from_some_rounds_and_the_level_from_others() -> None:
    def plain(sequences: int, slow: float) -> MeasuredSteps:
        seconds = slow * TARGET.seconds(100, sequences, sequences)
        times = StepTimes(0.0, seconds)
        return MeasuredSteps(StepStats(0, sequences, sequences, 100, 0, 0, 0, sequences, times, seconds, 0))

    shape, level = [plain(n, 1.0) for n in range(1, 7)] * 20, [plain(1, 2.0)] * 50
    target, draft = fit_steps(shape, level)
    for n in (1, 3, 6):
        assert target.seconds(100, n, n) == pytest.approx(2 * TARGET.seconds(100, n, n), rel=1e-3)
    assert draft == ForwardLatency(), "no step drafted"
    alone = fit_steps(level, level)[0]
    assert abs(alone.seconds(100, 6, 6) / target.seconds(100, 6, 6) - 1) > 0.1, (
        "the time of one sequence does not give the time of six"
    )
