"""The results of a run: numbers and plots."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cospec.core.interfaces import Clock
from cospec.core.stats import RequestStats, StepStats
from cospec.errors import InvalidInput, words
from cospec.metrics.engine_counters import price_per_million

POINTS = 60  # points of a series over time


@dataclass(slots=True)
class StepLog:
    """Every step of one engine, in columns."""

    clock: Clock
    times: list[float] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def add(self, stats: StepStats) -> None:
        """Add one step that ended now: sequences, tokens computed, proposed, accepted, committed."""
        self.times.append(self.clock())
        self.rows.append((stats.sequences, stats.batched_tokens, stats.proposed, stats.accepted, stats.committed))


@dataclass(slots=True)
class RequestLog:
    """The results of requests; all times in seconds.

    Attributes:
        request_seconds: the integral over time of the number of requests in the system.
        replayed: how often a request went on after the loss of its engine.
        failed: requests that ended with an error.
    """

    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    rejections: int = 0
    request_seconds: float = 0.0
    end: float = 0.0
    replayed: int = 0
    failed: int = 0

    def add(self, stats: RequestStats, tokens: int) -> None:
        """Add one finished request."""
        assert stats.e2e is not None and stats.ttft is not None, "a request that ended has its times"
        self.latencies.append(stats.e2e)
        self.first_tokens.append(stats.ttft)
        self.token_times.append((stats.e2e - stats.ttft) / max(1, tokens - 1))
        self.tokens += tokens
        self.drafts += stats.drafts
        self.accepted += stats.accepted
        self.rejections += stats.rejections


def summary(
    outcomes: RequestLog,
    engines: list[StepLog],
    busy: tuple[float, float],
    drafter_machines: int = 1,
    cost_per_hour: float = 0.0,
) -> dict[str, Any]:
    """Return one run as JSON.

    Args:
        busy: seconds of work of targets and drafters.
        drafter_machines: of each engine.
        cost_per_hour: the price of all machines; 0 if no price is declared, then the run has no price of tokens.

    ``acceptance`` is accepted / (accepted + rejections). ``mean_k`` is the number of drafted tokens per sequence and
    step. ``overlap`` is the sum of busy times over elapsed time, per engine. ``target_idle`` is the share of time in
    which a target computes no forward, ``drafters_idle`` that in which a drafter's machine does not draft; None where
    no drafter worked.
    """
    seconds = outcomes.end or 1.0
    rows = np.array([row for steps in engines for row in steps.rows], dtype=np.float64).reshape(-1, 5)
    sequences, batched, proposed, _, committed = rows.sum(axis=0)
    verified = outcomes.accepted + outcomes.rejections
    price = price_per_million(cost_per_hour, outcomes.tokens, seconds) if cost_per_hour else None
    return {
        "requests": len(outcomes.latencies),
        "seconds": round(seconds, 6),
        "latency": _spread(outcomes.latencies),
        "ttft": _spread(outcomes.first_tokens),
        "tpot": _spread(outcomes.token_times),
        "requests_per_second": round(len(outcomes.latencies) / seconds, 6),
        "throughput": round(outcomes.tokens / seconds, 4),
        "goodput": round(float(committed) / (busy[0] + busy[1]), 4) if sum(busy) else 0.0,
        "mean_in_system": round(outcomes.request_seconds / seconds, 4),
        "rounds": len(rows),
        "mean_batch": round(float(sequences) / max(1, len(rows)), 4),
        "mean_batched_tokens": round(float(batched) / max(1, len(rows)), 4),
        "mean_k": round(float(proposed) / max(1.0, float(sequences)), 4),
        "acceptance": round(outcomes.accepted / verified, 4) if verified else None,
        "mean_acceptance_length": round(1 + outcomes.accepted / outcomes.drafts, 4) if outcomes.drafts else 1.0,
        "overlap": round(sum(busy) / (seconds * len(engines)), 4),
        "target_idle": _idle(busy[0], seconds * len(engines)),
        "drafters_idle": _idle(busy[1], seconds * len(engines) * drafter_machines) if busy[1] else None,
        "series": _series(engines),
    } | ({} if price is None else {"price_per_million_tokens": round(price, 6)})


def _idle(busy: float, seconds: float) -> float:
    return round(1.0 - busy / seconds, 4)


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    data = np.array(values)
    p50, p99 = np.percentile(data, [50, 99])
    return {"mean": round(float(data.mean()), 6), "p50": round(float(p50), 6), "p99": round(float(p99), 6)}


def _series(engines: list[StepLog]) -> dict[str, list[float]]:
    """Return means over equal parts of the run.

    A part has its time, tokens drafted per sequence, sequences per step, and tokens per second.
    """
    times = np.array([time for steps in engines for time in steps.times])
    rows = np.array([row for steps in engines for row in steps.rows], dtype=np.float64).reshape(-1, 5)
    if not len(times):
        return {"time": [], "k": [], "batch": [], "throughput": []}
    width = max(float(times.max()), 1e-9) / POINTS
    place = np.minimum((times / width).astype(int), POINTS - 1)
    count = np.bincount(place, minlength=POINTS)
    sequences, _, proposed, _, committed = (np.bincount(place, column, POINTS) for column in rows.T)
    kept = np.flatnonzero(count)
    return {
        "time": [round((each + 0.5) * width, 4) for each in kept.tolist()],
        "k": np.round(proposed[kept] / np.maximum(sequences[kept], 1), 4).tolist(),
        "batch": np.round(sequences[kept] / count[kept], 4).tolist(),
        "throughput": np.round(committed[kept] / width, 4).tolist(),
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw latency and length over load for several loads, and length over time at the highest load.

    Raises:
        InvalidInput: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput(
            "plot", words("given without matplotlib"), "absent, or with the package: cospec[bench]"
        ) from None
    runs = found["runs"]
    loads = sorted({run["load"] for run in runs})
    figure = Figure(figsize=(13, 4), layout="constrained")
    latency, length, time = figure.subplots(1, 3)
    for variant in dict.fromkeys(run["variant"] for run in runs):
        own = sorted((run for run in runs if run["variant"] == variant), key=lambda run: float(run["load"]))
        latency.plot([run["load"] for run in own], [run["latency"]["mean"] for run in own], "o-", label=variant)
        length.plot([run["load"] for run in own], [run["mean_k"] for run in own], "o-", label=variant)
        series = own[-1]["series"]
        time.plot(series["time"], series["k"], label=variant)
    latency.set(xlabel="load", ylabel="mean latency, s", yscale="log")
    length.set(xlabel="load", ylabel="tokens drafted per sequence and step")
    time.set(xlabel=f"time at load {loads[-1]:g}, s", ylabel="tokens drafted per sequence and step")
    latency.legend()
    figure.savefig(path, dpi=120)
