"""Is one system faster than another, by how much, and how sure is that: paired ratios with bootstrap intervals.

Systems that ran the same work one right after the other share the machine's mood, so their *ratio* is steadier than
either time. The figure is the geometric mean of these ratios. Its interval is the bootstrap's percentile interval,
expanded for small samples (Hesterberg, arXiv:1411.5279): a plain one is too narrow by ``sqrt((n - 1) / n)`` and by the
difference between Student's and the normal distribution, and would call equal systems different too often. Resampling
never leaves the range of the sample, which fewer than eight pairs miss the truth with too often; they get Student's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 9_999
FEWEST = 8  # pairs to resample from


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast, with a confidence interval; ``low`` and ``high`` are NaN below two pairs."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1, equal speed."""
        return not self.low <= 1.0 <= self.high and not math.isnan(self.low)

    def as_json(self) -> dict[str, float | int | None]:
        """Plain numbers; None for an interval that there is not."""
        low, high = (None if math.isnan(end) else end for end in (self.low, self.high))
        return {"ratio": self.value, "low": low, "high": high, "pairs": self.pairs, "confidence": CONFIDENCE}


def paired_ratio(slow: Sequence[float], fast: Sequence[float], seed: int = 0, confidence: float = CONFIDENCE) -> Ratio:
    """``slow / fast``: how many times as fast the second is, from seconds (or any cost) on the same pieces of work.

    Args:
        slow, fast: ``[n]`` positive costs, of the same work at the same index.

    Raises:
        ValueError: lengths that differ, no pairs, or a cost that is not positive.
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
    """A confidence interval of the mean of ``logs``, ``[n]``."""
    from scipy import stats

    n = len(logs)
    student = float(stats.t.ppf(1 - (1 - confidence) / 2, n - 1))
    if n < FEWEST:
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
    """How many times as fast as ``baseline`` every other system is."""
    return {name: paired_ratio(costs[baseline], own, seed) for name, own in costs.items() if name != baseline}
