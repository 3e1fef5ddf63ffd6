"""Paired ratios with bootstrap intervals: whether one system is faster than another, and by how much.

Systems that run the same work directly after each other share the machine's condition, so their *ratio* varies less
than their times. The result is the geometric mean of these ratios. Its interval is the bootstrap's percentile interval,
expanded for small samples (Hesterberg, arXiv:1411.5279). A plain interval is too narrow by ``sqrt((n - 1) / n)`` and by
the difference between Student's and the normal distribution. Such an interval would call equal systems different too
often. Resampling never leaves the range of the sample, which with fewer than eight pairs misses the truth too often.
Fewer pairs get Student's interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 9_999
MIN_PAIRS = 8  # pairs for resampling


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speed ratio with a confidence interval; ``low`` and ``high`` are NaN below two pairs."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1, equal speed."""
        return not self.low <= 1.0 <= self.high and not math.isnan(self.low)

    def as_json(self) -> dict[str, float | int | None]:
        """Return plain numbers; None for a missing interval."""
        low, high = (None if math.isnan(end) else end for end in (self.low, self.high))
        return {"ratio": self.value, "low": low, "high": high, "pairs": self.pairs, "confidence": CONFIDENCE}


def paired_ratio(slow: Sequence[float], fast: Sequence[float], seed: int = 0, confidence: float = CONFIDENCE) -> Ratio:
    """Return ``slow / fast``: the speed ratio, from seconds or other costs of the same pieces of work.

    Args:
        slow, fast: ``[n]`` positive costs; equal indices are the same work.

    Raises:
        ValueError: lengths differ, no pair exists, or a cost is not positive.
    """
    if len(slow) != len(fast) or not len(slow):
        raise ValueError(f"ratios need pairs, but there are {len(slow)} and {len(fast)} costs")
    above, below = np.asarray(slow, dtype=np.float64), np.asarray(fast, dtype=np.float64)
    if not (np.all(above > 0) and np.all(below > 0)):
        raise ValueError("costs are positive")
    logs = np.log(above / below)
    n, middle = len(logs), float(np.mean(logs))
    if n < 2:
        return Ratio(math.exp(middle), math.nan, math.nan, n)
    if np.ptp(logs) == 0.0:
        return Ratio(math.exp(middle), math.exp(middle), math.exp(middle), n)
    low, high = _interval(logs, confidence, seed)
    return Ratio(math.exp(middle), math.exp(low), math.exp(high), n)


def _interval(logs: NDArray[np.float64], confidence: float, seed: int) -> tuple[float, float]:
    """Return a confidence interval of the mean of ``logs``, ``[n]``."""
    from scipy import stats

    n = len(logs)
    student = float(stats.t.ppf(1 - (1 - confidence) / 2, n - 1))
    if n < MIN_PAIRS:
        middle, error = float(np.mean(logs)), student * float(stats.sem(logs))
        return middle - error, middle + error
    tail = float(stats.norm.cdf(-math.sqrt(n / (n - 1)) * student))
    found = stats.bootstrap(
        (logs,),
        np.mean,
        confidence_level=1 - 2 * tail,
        n_resamples=RESAMPLES,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def against(costs: Mapping[str, Sequence[float]], baseline: str, seed: int = 0) -> dict[str, Ratio]:
    """Return the speed ratio of every other system to ``baseline``."""
    return {name: paired_ratio(costs[baseline], own, seed) for name, own in costs.items() if name != baseline}
