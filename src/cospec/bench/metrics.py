"""Latencies and rates of recorded requests: pure functions of timings, in the names of ``vllm bench serve``.

========  ==============================================================================================================
``ttft``  time to first token: from sending the request to its first chunk with text
``itl``   inter-token latency: one value for every token after the first. The tokens of a chunk share the time since the
          chunk before it equally; the first chunk's other tokens came with the first, so their share is 0
``tpot``  time per output token: (last chunk - first chunk) / (tokens - 1), the mean of the request's own ``itl``
``e2el``  end-to-end latency: from sending to the last chunk with text
========  ==============================================================================================================

Thus ``itl`` sums to ``e2el - ttft`` for every request and any chunking: four tokens every 40 ms have an ``itl`` of 10
ms. A limit on concurrency delays sending; the delay is not part of a latency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cospec.bench.request_record import Chunk, Timing
from cospec.errors import InvalidInput
from cospec.metrics.engine_counters import price_per_million

METRICS = ("ttft", "tpot", "itl", "e2el")
SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of one request in seconds; None with too few tokens, or without streaming."""

    e2el: float
    ttft: float | None = None
    tpot: float | None = None
    itl: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """The metrics and percentiles of a report.

    Attributes:
        goodput: upper bounds of a good request in milliseconds, by metric; empty for no goodput.
        cost_per_hour: the declared price of all machines; 0 for no price of tokens.
    """

    metrics: tuple[str, ...] = METRICS
    percentiles: tuple[float, ...] = (50.0, 99.0)
    goodput: Mapping[str, float] = field(default_factory=dict)
    cost_per_hour: float = 0.0


def latency(timing: Timing) -> Latency | None:
    """Compute the latencies of one request; None without text.

    Raises:
        ValueError: a chunk has an earlier time than the chunk before.
    """
    chunks = [chunk for chunk in timing.chunks if chunk.text or chunk.tokens]
    if not chunks:
        return None
    if any(later.at < earlier.at for earlier, later in pairwise(chunks)):
        raise ValueError(f"the chunks of {timing.id} are not in order of time")
    first, last = chunks[0].at, chunks[-1].at
    e2el = last - timing.sent
    if not timing.streamed:
        return Latency(e2el)
    tokens = sum(chunk.tokens for chunk in chunks)
    tpot = (last - first) / (tokens - 1) if tokens > 1 else None
    return Latency(e2el, first - timing.sent, tpot, gaps(chunks))


def gaps(chunks: Sequence[Chunk]) -> tuple[float, ...]:
    """Return inter-token latencies of one stream in seconds; see the module docstring for the shares.

    A chunk without the beginning of a token continues an earlier token. Its time counts with the next chunk that begins
    a token, or with the last such chunk.
    """
    counted = [(chunk.at, chunk.tokens) for chunk in chunks if chunk.tokens]
    if not counted:
        return ()
    start = chunks[0].at
    counted[-1] = (chunks[-1].at, counted[-1][1])
    (at, head), rest = counted[0], counted[1:]
    if not rest:
        return ((at - start) / (head - 1),) * (head - 1) if head > 1 else ()
    found: list[float] = [0.0] * (head - 1)
    before = start
    for at, count in rest:
        found.extend([(at - before) / count] * count)
        before = at
    return tuple(found)


def summarise(timings: Sequence[Timing], duration: float, selection: Selection) -> dict[str, float | int]:
    """Summarise a run under ``vllm bench serve``'s names; latencies in ms, rates per second.

    Latencies and goodput cover successful requests; tokens of failed requests count in no rate.

    Args:
        duration: seconds from the first request's arrival to the last end.
    """
    done = [timing for timing in timings if timing.ok]
    found = [one for one in map(latency, done) if one is not None]
    read = sum(timing.prompt_tokens for timing in done)
    written = sum(timing.output_tokens for timing in done)
    figures: dict[str, float | int] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": _rate(len(done), duration),
        "output_throughput": _rate(written, duration),
        "total_token_throughput": _rate(read + written, duration),
    }
    price = price_per_million(selection.cost_per_hour, written, duration)
    if selection.cost_per_hour and price is not None:
        figures["price_per_million_tokens"] = price
    if selection.goodput:
        good = sum(keeps(one, selection.goodput) for one in found)
        figures["request_goodput"] = _rate(good, duration)
        figures["goodput_share"] = good / len(timings) if timings else 0.0
    for metric in selection.metrics:
        figures.update(_distribution(metric, values(found, metric), selection.percentiles))
    return figures


def values(latencies: Sequence[Latency], metric: str) -> list[float]:
    """Return all values of a metric in seconds; ``itl`` has one per token, the others one per request."""
    if metric == "itl":
        return [gap for one in latencies for gap in one.itl]
    return [value for one in latencies if (value := getattr(one, metric)) is not None]


def keeps(one: Latency, bounds_ms: Mapping[str, float]) -> bool:
    """Whether a request is within every bound; a missing metric, such as the TPOT of one token, is within."""
    return all((value := getattr(one, metric)) is None or value * 1e3 <= bound for metric, bound in bounds_ms.items())


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse ``["ttft:200", "tpot:50"]`` into bounds in ms; one string may hold several pairs.

    Raises:
        InvalidInput: the text is not ``METRIC:MS`` with a metric of ``SLO_METRICS``.
    """
    bounds: dict[str, float] = {}
    for pair in " ".join(pairs).replace(",", " ").split():
        metric, _, text = pair.partition(":")
        bound = _number(text)
        if metric not in SLO_METRICS or bound is None or bound < 0:
            raise InvalidInput("goodput", pair, "METRIC:MILLISECONDS with one of " + ", ".join(SLO_METRICS))
        bounds[metric] = bound
    return bounds


def parse_metrics(text: str) -> tuple[str, ...]:
    """Parse ``"ttft,tpot"`` into names, in order.

    Raises:
        InvalidInput: a name is no metric.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in METRICS:
            raise InvalidInput("percentile_metrics", name, "a comma-separated list of " + ", ".join(METRICS))
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Parse ``"50,99"`` into numbers.

    Raises:
        InvalidInput: a part is no number from 0 to 100.
    """
    found: list[float] = []
    for part in (part.strip() for part in text.split(",")):
        value = _number(part)
        if value is None or not 0 <= value <= 100:
            raise InvalidInput("metric_percentiles", part, "a comma-separated list of numbers from 0 to 100")
        found.append(value)
    return tuple(found)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _rate(count: float, duration: float) -> float:
    return count / duration if duration > 0 else 0.0


def _distribution(metric: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles in ms; empty without values."""
    if not seconds:
        return {}
    ms = np.asarray(seconds, dtype=np.float64) * 1e3
    figures = {
        f"mean_{metric}_ms": float(ms.mean()),
        f"median_{metric}_ms": float(np.median(ms)),
        f"std_{metric}_ms": float(ms.std()),
    }
    for percentile in percentiles:
        figures[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(ms, percentile))
    return figures
