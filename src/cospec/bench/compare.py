"""Compares several systems over the same prompts in one run, so that only the system differs.

The prompts are cut into pieces that run as batches. For every repetition of a piece, all systems run the piece directly
after each other, in random order. Each system has a warm-up. The comparison uses ratios within such a turn.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from typing import Any

import numpy as np

from cospec.bench.counters import SpeculationCounters
from cospec.bench.metrics import Latency, Selection, latency, values
from cospec.bench.paired_ratios import Ratio, paired_ratio
from cospec.bench.request_record import Params, Prompt, Timing
from cospec.bench.run_figures import figures
from cospec.bench.systems import System
from cospec.bench.token_counter import TokenCounter

COSTS = ("time_per_token", "ttft", "tpot", "e2el")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """The plan of a comparison.

    Attributes:
        batch: prompts that run together.
        repetitions: turns of every piece.
        warmups: uncounted runs of every system before the first turn.
        seed: of the order of systems in each turn, and of the bootstrap.
    """

    batch: int = 1
    repetitions: int = 3
    warmups: int = 1
    seed: int = 0

    def pieces(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Return the batches; the last batch may be smaller."""
        return [list(prompts[start : start + self.batch]) for start in range(0, len(prompts), self.batch)]


@dataclass(frozen=True, slots=True)
class Observation:
    """One system's run of one piece in one turn.

    Attributes:
        counters: of this run alone, because two systems may be one server; None if not reported.
    """

    system: str
    piece: int
    repetition: int
    timings: tuple[Timing, ...]
    counters: SpeculationCounters | None = None

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.timings)

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last end."""
        return max((one.end for one in self.timings), default=0.0)

    def costs(self) -> dict[str, float]:
        """Return the compared costs in seconds, as far as this run has the data. Lower is better."""
        tokens = sum(one.output_tokens for one in self.timings)
        found: dict[str, float] = {"time_per_token": self.seconds / tokens} if tokens else {}
        latencies: list[Latency] = [one for one in map(latency, self.timings) if one is not None]
        for metric in COSTS[1:]:
            own = values(latencies, metric)
            if len(own) == len(self.timings):
                found[metric] = float(np.mean(own))
        return {name: cost for name, cost in found.items() if cost > 0}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All observations; the first system is the baseline.

    Attributes:
        prices: of each system's machines, per hour; 0 if none is declared.
    """

    systems: tuple[str, ...]
    observations: tuple[Observation, ...]
    prices: tuple[float, ...]

    def of(self, system: str) -> list[Observation]:
        """Return one system's observations in the order of turns."""
        return [one for one in self.observations if one.system == system]

    def counters(self, system: str) -> SpeculationCounters | None:
        """Return one system's counters over all its runs; None if not reported."""
        reported = [one.counters for one in self.of(system) if one.counters is not None]
        return reduce(operator.add, reported) if reported else None

    def ratio(self, system: str, baseline: str, cost: str, seed: int = 0) -> Ratio | None:
        """Return how many times less ``system`` costs than ``baseline``.

        Turns with a failed request are omitted; without a common turn the result is None.
        """
        pairs = [
            (own.costs()[cost], reference.costs()[cost])
            for reference, own in zip(self.of(baseline), self.of(system), strict=True)
            if own.ok and reference.ok and cost in own.costs() and cost in reference.costs()
        ]
        return paired_ratio([reference for _, reference in pairs], [own for own, _ in pairs], seed) if pairs else None

    def same_text(self, system: str, baseline: str) -> float:
        """Return the share of outputs that equal the baseline's, character for character."""
        pairs = [
            (own.text, reference.text)
            for one, other in zip(self.of(system), self.of(baseline), strict=True)
            for own, reference in zip(one.timings, other.timings, strict=True)
        ]
        return sum(own == reference for own, reference in pairs) / len(pairs) if pairs else 0.0


def compare(
    systems: Sequence[System],
    prompts: Sequence[Prompt],
    params: Params,
    schedule: ComparisonPlan,
    counter: TokenCounter,
    progress: Progress = lambda name: None,
) -> Comparison:
    """Start all systems, warm up, and alternate the systems; stop all systems after any error.

    Args:
        progress: called with a system's name after each of its runs, warm-ups included.
    """
    shuffler, pieces, found = random.Random(schedule.seed), schedule.pieces(prompts), list[Observation]()
    with ExitStack() as running:
        for system in systems:
            system.start()
            running.callback(system.stop)
        for system in systems:
            for number in range(schedule.warmups):
                system.run(pieces[number % len(pieces)], params)
                progress(system.name)
        for repetition in range(schedule.repetitions):
            for number, piece in enumerate(pieces):
                for system in shuffler.sample(systems, len(systems)):
                    before = system.counters()
                    timings = counter.count(piece, system.run(piece, params))
                    own = _between(before, system.counters())
                    found.append(Observation(system.name, number, repetition, tuple(timings), own))
                    progress(system.name)
        prices = tuple(system.cost_per_hour() for system in systems)
    return Comparison(tuple(system.name for system in systems), tuple(found), prices)


def _between(before: SpeculationCounters | None, after: SpeculationCounters | None) -> SpeculationCounters | None:
    return after - before if before is not None and after is not None else None


def report(comparison: Comparison, selection: Selection, seed: int = 0) -> dict[str, Any]:
    """Return ``runs``, the values of each system, and ``ratios`` of each system to all systems before."""
    baseline = comparison.systems[0]
    runs = list[dict[str, Any]]()
    for name, price in zip(comparison.systems, comparison.prices, strict=True):
        own = comparison.of(name)
        timings = [timing for one in own for timing in one.timings]
        priced = replace(selection, cost_per_hour=selection.cost_per_hour or price)
        run = figures(timings, sum(one.seconds for one in own), priced, comparison.counters(name))
        runs.append({"label": name, **run, "seconds": [one.seconds for one in own]})
        if name != baseline:
            runs[-1]["same_text"] = comparison.same_text(name, baseline)
    ratios = [
        {"system": system, "baseline": first, "cost": cost, **ratio.as_json()}
        for first, system in combinations(comparison.systems, 2)
        for cost in COSTS
        if (ratio := comparison.ratio(system, first, cost, seed)) is not None
    ]
    return {"runs": runs, "ratios": ratios}
