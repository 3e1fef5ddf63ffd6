"""Detects saturation. Beyond saturation every latency measures the length of the run instead of the server.

Either of two signs marks a run. In the second half of the arrivals significantly fewer requests ended than arrived, so
the queue grew. Or the time to first token rose over the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cospec.bench.request_record import Timing

MIN_REQUESTS = 12  # requests; fewer are not significant
SIGNIFICANT = 0.01
TREND = 0.4  # Kendall's tau above which a trend is no accident of a burst
RISE = 1.5  # the last quarter's median TTFT over the first quarter's
MIN_COMPLETION_RATIO = 0.85  # completions per arrival below which a queue grows
DEVIATIONS = 2.5  # number of standard deviations of a Poisson count


@dataclass(frozen=True, slots=True)
class Saturation:
    """The findings; rates in requests per second over the second half of the arrivals.

    Attributes:
        reasons: why the run counts as saturated, one sentence each; empty if not saturated.
        ttft_trend: Kendall's tau between arrival and TTFT; None for too few requests.
    """

    reasons: tuple[str, ...] = ()
    arrival_rate: float = 0.0
    completion_rate: float = 0.0
    ttft_trend: float | None = None

    @property
    def saturated(self) -> bool:
        return bool(self.reasons)


def detect(timings: Sequence[Timing]) -> Saturation:
    """Analyse an open-loop run.

    A closed loop has no queue, and an all-at-once run is saturated by design. So arrivals without duration give no
    finding.
    """
    arrivals = sorted(timing.arrival for timing in timings)
    if len(timings) < MIN_REQUESTS or arrivals[-1] <= arrivals[0]:
        return Saturation()
    middle, end = arrivals[len(arrivals) // 2], arrivals[-1]
    if end <= middle:
        return Saturation()
    arrived = sum(middle < at <= end for at in arrivals)
    completed = sum(middle < timing.end <= end for timing in timings)
    reasons: list[str] = []
    if completed < MIN_COMPLETION_RATIO * arrived and arrived - completed > DEVIATIONS * math.sqrt(arrived):
        reasons.append(f"the queue grew: {arrived} requests arrived while {completed} ended")
    tau, rise = _trend(timings)
    if rise is not None:
        reasons.append(f"the time to first token rose {rise:.1f}-fold over the run")
    seconds = end - middle
    return Saturation(tuple(reasons), arrived / seconds, completed / seconds, tau)


def _trend(timings: Sequence[Timing]) -> tuple[float | None, float | None]:
    """Return Kendall's tau of TTFT over arrival, and the rise if significant and large."""
    from scipy import stats

    points = [(one.arrival, one.chunks[0].at - one.arrival) for one in timings if one.streamed and one.chunks]
    if len(points) < MIN_REQUESTS:
        return None, None
    points.sort()
    waits = np.array([wait for _, wait in points])
    if np.ptp(waits) == 0:
        return 0.0, None
    test = stats.kendalltau(np.arange(len(waits)), waits, alternative="greater")
    tau, p = float(test.statistic), float(test.pvalue)
    quarter = len(waits) // 4
    first, last = float(np.median(waits[:quarter])), float(np.median(waits[-quarter:]))
    rose = tau > TREND and p < SIGNIFICANT and first > 0 and last > RISE * first
    return tau, last / first if rose else None
