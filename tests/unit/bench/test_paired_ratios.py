"""Ratios and their intervals: on recorded timings of equal systems, and on made-up ones of unequal systems."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from cospec.bench.paired_ratios import against, paired_ratio

RECORDED = json.loads((Path(__file__).parent / "recorded_aa.json").read_text(encoding="utf-8"))
RUNS = 20


def runs() -> list[tuple[list[float], list[float]]]:
    """The recording cut into runs; in each both systems are the same one."""
    first, second = RECORDED["seconds"]
    size = len(first) // RUNS
    return [(first[i * size : (i + 1) * size], second[i * size : (i + 1) * size]) for i in range(RUNS)]


def test_equal_systems_are_found_equal_on_recorded_timings() -> None:
    assert len(RECORDED["seconds"][0]) == len(RECORDED["seconds"][1]) >= RUNS * 8
    holding = [not paired_ratio(one, other).differs for one, other in runs()]
    assert sum(holding) >= 0.95 * RUNS


def test_the_same_recording_tells_systems_apart_that_differ() -> None:
    slower = [paired_ratio([1.25 * second for second in one], other) for one, other in runs()]
    assert sum(ratio.differs for ratio in slower) >= 0.8 * RUNS
    assert np.mean([ratio.value for ratio in slower]) == pytest.approx(1.25, rel=0.05)


@pytest.mark.parametrize("n", [4, 8, 30])
def test_intervals_hold_the_truth_as_often_as_they_say(n: int) -> None:
    generator, held = np.random.default_rng(1), 0
    for run in range(120):
        base = generator.lognormal(0.0, 0.5, n)
        slow, fast = (base * factor * generator.lognormal(0.0, 0.1, n) for factor in (2.0, 1.0))
        ratio = paired_ratio(list(slow), list(fast), seed=run)
        held += ratio.low <= 2.0 <= ratio.high
    assert held >= 0.88 * 120  # 95% less four standard deviations of the count


def test_pairing_takes_out_what_both_share() -> None:
    generator = np.random.default_rng(0)
    base = generator.lognormal(0.0, 2.0, 20)
    ratio = paired_ratio(list(base * 1.5), list(base * generator.lognormal(0.0, 0.01, 20)))
    assert ratio.low < 1.5 < ratio.high and ratio.high - ratio.low < 0.05


def test_few_or_equal_pairs() -> None:
    one = paired_ratio([2.0], [1.0])
    assert one.value == pytest.approx(2.0) and math.isnan(one.low) and one.as_json()["low"] is None and not one.differs
    same = paired_ratio([3.0, 3.0], [1.0, 1.0])
    assert same.low == same.high == same.value == pytest.approx(3.0) and same.differs


def test_the_seed_decides_and_nonsense_is_refused() -> None:
    slow, fast = [1.0, 1.2, 0.9, 1.4], [1.0, 1.0, 1.0, 1.1]
    assert paired_ratio(slow, fast, seed=3) == paired_ratio(slow, fast, seed=3)
    for wrong in (([], []), ([1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 1.0])):
        with pytest.raises(ValueError, match=r"pairs|positive"):
            paired_ratio(*wrong)


def test_every_system_is_held_against_the_baseline() -> None:
    found = against({"base": [4.0, 4.0], "half": [2.0, 2.0], "same": [4.0, 4.0]}, "base")
    assert found["half"].value == pytest.approx(2.0) and found["same"].value == pytest.approx(1.0)
