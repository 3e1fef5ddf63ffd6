"""The deadline of a node's answer is the configured quantile of the answers' times."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.cluster.nodes.deadline import WARM_UP, ResponseTimes, work_of
from cospec.core.types import DraftBudget


@pytest.mark.parametrize("quantile", [0.8, 0.95])
@pytest.mark.parametrize("sigma", [0.1, 0.5])
def test_the_share_of_late_answers(quantile: float, sigma: float) -> None:
    random, times, late = np.random.default_rng(1), ResponseTimes(quantile), 0
    for number in range(4000):
        work = float(random.integers(1, 9))
        seconds = 0.02 * work * float(random.lognormal(0, sigma))
        late += number >= 1000 and seconds > times.deadline(work) - 0.001
        times.observe(work, seconds)
    assert late / 3000 == pytest.approx(1 - quantile, abs=0.02)


def test_a_node_that_becomes_slower_gets_more_time() -> None:
    times = ResponseTimes(most=2.0)
    assert times.deadline(1.0) == 2.0, "nothing is known"
    for _ in range(WARM_UP + 50):
        times.observe(4.0, 0.01)
    assert times.deadline(4.0) < 0.03
    for _ in range(60):
        times.observe(4.0, 0.1)
    assert 0.1 < times.deadline(4.0) < 0.4


def test_missing_answers_extend_a_deadline_ten_times_at_most() -> None:
    times = ResponseTimes(most=2.0)
    for _ in range(WARM_UP):
        times.observe(4.0, 0.01)
    for _ in range(10_000):
        times.miss()
    assert times.deadline(4.0) == pytest.approx(0.1, abs=0.01)


def test_work_counts_steps_and_new_tokens() -> None:
    assert work_of([DraftBudget(4, 4), DraftBudget(2, 2)], 64) == 1 + 4 + 2
