"""The detector separates a growing queue from a steady queue, on a simulated server."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from cospec.bench.request_record import Chunk, Timing
from cospec.bench.saturation_detector import detect
from cospec.simulation.arrivals import ByRate, Trace


def served(arrivals: list[float], seconds: float, workers: int, seed: int = 0) -> list[Timing]:
    """Requests of about ``seconds`` each at a server that runs ``workers`` at a time, first come first served."""
    generator = np.random.default_rng(seed)
    free = [0.0] * workers
    found: list[Timing] = []
    for number, arrival in enumerate(arrivals):
        start = max(arrival, heapq.heappop(free))
        end = start + seconds * float(generator.uniform(0.7, 1.3))
        heapq.heappush(free, end)
        chunks = (Chunk(start + 0.1 * seconds, "a", 1), Chunk(end, "b", 9))
        found.append(Timing(id=str(number), arrival=arrival, sent=arrival, end=end, chunks=chunks))
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_server_that_keeps_up_is_not_marked(load: float, seed: int) -> None:
    found = detect(served(ByRate(load * 8 / 0.5).times(200, seed), 0.5, 8, seed))
    assert not found.saturated, found.reasons
    assert found.arrival_rate > 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("load", [1.3, 2.0])
def test_an_overloaded_server_is_marked(load: float, seed: int) -> None:
    found = detect(served(ByRate(load * 8 / 0.5).times(200, seed), 0.5, 8, seed))
    assert found.saturated and found.ttft_trend is not None and found.ttft_trend > 0.4
    assert found.completion_rate < found.arrival_rate


def test_few_requests_or_no_arrival_times_tell_nothing() -> None:
    assert not detect(served([0.0] * 50, 0.5, 1)).saturated
    assert not detect(served(Trace((0.0, 1.0, 2.0)).times(3, 0), 5.0, 1)).saturated
    assert not detect([]).saturated
