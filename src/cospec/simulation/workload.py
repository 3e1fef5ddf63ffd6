"""The requests of a run, drawn by seed: when each comes, how long it is, and which of its tokens are easy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cospec.errors import InvalidInput
from cospec.simulation.arrivals import Trace, by_rate
from cospec.simulation.scenario import ArrivalConfig, DomainConfig, LengthConfig, Scenario


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request to come.

    Attributes:
        due: seconds; None where it comes when another has ended.
        luck: one number from 0 to 1 for each output token: a drafter of acceptance α is right where it is below α. So
            every variant meets the same requests with the same easy and hard tokens.
    """

    number: int
    domain: DomainConfig
    due: float | None
    prompt: int
    output: int
    luck: list[float]


def jobs(scenario: Scenario, load: float, folder: Path) -> Iterator[SimulatedRequest]:
    """The requests of one run in order.

    Args:
        load: requests per second; the concurrency of a closed loop; how many times as fast a recording or its segments.
    """
    generator = np.random.default_rng(scenario.seed)
    times = due(scenario.arrivals, scenario.requests, load, scenario.seed, folder)
    weights = np.array([domain.weight for domain in scenario.domains])
    kinds = generator.choice(len(weights), size=scenario.requests, p=weights / weights.sum())
    traces = [_trace(domain, folder) for domain in scenario.domains]
    for number, kind in enumerate(kinds.tolist()):
        domain, known = scenario.domains[kind], traces[kind]
        prompt, output = _draw(domain.prompt, generator), _draw(domain.output, generator)
        if known:
            right = known[number % len(known)]
            output = len(right)
            luck = [0.0 if each else 1.0 for each in right]
        else:
            luck = generator.random(output).tolist()
        yield SimulatedRequest(number, domain, times[number] if times else None, prompt, output, luck)


def due(coming: ArrivalConfig, count: int, load: float, seed: int, folder: Path) -> list[float]:
    """When each of ``count`` requests comes; empty for a closed loop."""
    if coming.kind == "closed":
        return []
    if coming.kind == "open":
        return by_rate(load, coming.burstiness).times(count, seed)
    if coming.kind == "trace":
        return [time / load for time in Trace.read(folder / str(coming.trace)).times(count, seed)]
    return [time / load for time in _changing(coming, count, np.random.default_rng(seed))]


def _changing(coming: ArrivalConfig, count: int, generator: np.random.Generator) -> list[float]:
    """A Poisson process of changing rate: even steps of the expected number of arrivals, turned back into times."""
    expected = np.cumsum(generator.exponential(size=count))
    seconds = np.array([segment.seconds for segment in coming.segments])
    each = seconds * np.array([segment.rate for segment in coming.segments])
    rounds, rest = np.divmod(expected, each.sum())
    ends = np.concatenate([[0.0], np.cumsum(each)])
    return list((rounds * seconds.sum() + np.interp(rest, ends, np.concatenate([[0.0], np.cumsum(seconds)]))).tolist())


def _draw(length: LengthConfig, generator: np.random.Generator) -> int:
    drawn = length.mean
    if length.variation:
        spread = math.log(1 + length.variation**2)
        drawn = generator.lognormal(math.log(length.mean) - spread / 2, math.sqrt(spread))
    return min(max(round(drawn), length.least), length.most)


def _trace(domain: DomainConfig, folder: Path) -> list[list[int]]:
    if domain.trace is None:
        return []
    try:
        lines = (folder / domain.trace).read_text(encoding="utf-8").splitlines()
        return [[int(each) for each in json.loads(line)] for line in lines if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput("trace", domain.trace, f"a file with one JSON list of 0 and 1 per line ({error})") from None
