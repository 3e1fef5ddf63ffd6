"""The requests of a run, drawn by seed: arrival times, lengths, and the difficulty of each token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np

from cospec.errors import InvalidInput, reason
from cospec.simulation.arrivals import Trace, by_rate
from cospec.simulation.recorded_drafts import read_recording
from cospec.simulation.scenario import ArrivalConfig, DomainConfig, LengthConfig, Scenario

FILLER = 1  # every token of a request without a recording


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request of the simulation.

    Attributes:
        due: arrival in seconds; None if the request arrives when another has ended.
        prompt, output: tokens; ``FILLER`` without a recording.
        difficulty: one number from 0 to 1 per output token: a drafter of acceptance α is correct if the number is below
            α. All variants get the same requests with the same difficulties.
        recorded: the number of the request in the recording.
    """

    number: int
    domain: DomainConfig
    due: float | None
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    difficulty: list[float]
    recorded: int | None = None


def simulated_requests(scenario: Scenario, load: float, folder: Path) -> Iterator[SimulatedRequest]:
    """Yield the requests of one run in order.

    Args:
        load: requests per second; the concurrency of a closed loop; or the speed-up of a trace or of segments.
    """
    generator = np.random.default_rng(scenario.seed)
    times = due(scenario.arrivals, scenario.requests, load, scenario.seed, folder)
    weights = np.array([domain.weight for domain in scenario.domains])
    kinds = generator.choice(len(weights), size=scenario.requests, p=weights / weights.sum())
    traces = [_trace(domain, folder) for domain in scenario.domains]
    recording = None if scenario.recording is None else read_recording(folder / scenario.recording)
    turns = [cycle(recording.of_domain(each.name) if recording else ()) for each in scenario.domains]
    for number, kind in enumerate(kinds.tolist()):
        domain, known, moment = scenario.domains[kind], traces[kind], times[number] if times else None
        if recording is not None:
            place = next(turns[kind])
            one = recording.requests[place]
            difficulty = generator.random(len(one.output)).tolist()
            yield SimulatedRequest(number, domain, moment, one.prompt, one.output, difficulty, place)
            continue
        prompt, output = _draw(domain.prompt, generator), _draw(domain.output, generator)
        if known:
            right = known[number % len(known)]
            output = len(right)
            difficulty = [0.0 if each else 1.0 for each in right]
        else:
            difficulty = generator.random(output).tolist()
        yield SimulatedRequest(number, domain, moment, (FILLER,) * prompt, (FILLER,) * output, difficulty)


def due(coming: ArrivalConfig, count: int, load: float, seed: int, folder: Path) -> list[float]:
    """Return the arrival times of ``count`` requests; empty for a closed loop."""
    if coming.kind == "closed":
        return []
    if coming.kind == "open":
        return by_rate(load, coming.burstiness).times(count, seed)
    if coming.kind == "trace":
        return [time / load for time in Trace.read(folder / str(coming.trace)).times(count, seed)]
    return [time / load for time in _changing(coming, count, np.random.default_rng(seed))]


def _changing(coming: ArrivalConfig, count: int, generator: np.random.Generator) -> list[float]:
    """Draw a Poisson process of changing rate: steps of the expected number of arrivals, converted into times."""
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
        raise InvalidInput(
            "trace", domain.trace, f"a file with one JSON list of 0 and 1 per line ({reason(error)})"
        ) from None
