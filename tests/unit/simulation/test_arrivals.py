"""Arrivals: the same for the same seed, and distributed as they say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cospec.errors import InvalidInput
from cospec.simulation.arrivals import AtOnce, ByRate, Trace, by_rate

N = 4000


def gaps(rate: float, burstiness: float, seed: int = 3) -> np.ndarray:
    return np.diff(ByRate(rate, burstiness).times(N, seed))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_follow_their_gamma(burstiness: float) -> None:
    found = gaps(5.0, burstiness)
    distribution = stats.gamma(burstiness, scale=1 / (5.0 * burstiness))
    assert stats.kstest(found, distribution.cdf).pvalue > 0.01
    assert np.std(found) / np.mean(found) == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_poisson_arrivals_differ_from_burstier_arrivals() -> None:
    exponential = stats.expon(scale=1 / 5.0)
    assert stats.kstest(gaps(5.0, 1.0), exponential.cdf).pvalue > 0.01
    assert stats.kstest(gaps(5.0, 0.5), exponential.cdf).pvalue < 1e-6


def test_the_seed_decides() -> None:
    arrivals = ByRate(2.0)
    assert arrivals.times(20, 1) == arrivals.times(20, 1) != arrivals.times(20, 2)
    times = arrivals.times(20, 1)
    assert times[0] == 0.0 and times == sorted(times) and arrivals.times(0, 1) == []


def test_an_infinite_rate_is_everything_at_once() -> None:
    assert by_rate(math.inf) == AtOnce() and AtOnce().times(3, 0) == [0.0] * 3


def test_a_trace_starts_at_nought(tmp_path: Path) -> None:
    path = tmp_path / "times.txt"
    path.write_text("# seconds\n10\n10.5\n\n12\n")
    trace = Trace.read(path)
    assert trace.times(3, 0) == [0.0, 0.5, 2.0]
    with pytest.raises(InvalidInput, match="at most 3"):
        trace.times(4, 0)


@pytest.mark.parametrize(("text", "line"), [("1\nsoon\n", "line 2"), ("2\n1\n", "line 2"), ("", "no times")])
def test_a_bad_trace_is_named(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "times.txt"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=line):
        Trace.read(path)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)])
def test_wrong_rates_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(InvalidInput, match="above 0"):
        by_rate(rate, burstiness)
