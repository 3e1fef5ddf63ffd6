"""Our figures for the headline claims of the papers, as factors from the stored results; above 1 is a gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.headlines import stored
from benchmarks.papers import cosine_online
from benchmarks.papers.comparisons import fastest_relaxed
from benchmarks.papers.cosine_nodes import AT_EIGHT, EIGHT, NODES, WHOLE, Nodes
from benchmarks.papers.cosine_nodes import BASELINES as AT_FOUR
from benchmarks.papers.cosine_offline import BASELINES, BATCHES
from benchmarks.papers.pools import Pool
from benchmarks.papers.scenarios import FOLDER, Runs, described
from benchmarks.papers.smartspec_rates import MEASURED
from cospec.simulation.scenario import Scenario

COLLABORATIVE = "collaborative", "collaborative_avx2"  # runs of one benchmark
Figure = Sequence[float]  # one value, or a value and the ends of its interval
Find = Callable[[], Figure]


def spread(found: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most of several settings."""
    return median(found), min(found), max(found)


def inverse(row: Mapping[str, float]) -> tuple[float, float, float]:
    """A ratio of latencies as a factor of speed."""
    return 1 / row["ratio"], 1 / row["high"], 1 / row["low"]


def under_load(kernels: str, place: int) -> Find:
    """The default's speed over no speculation, in the worst run; ``place`` counts the rates, slowest first."""

    def find() -> Figure:
        runs = [stored(source.file)["rows"] for who, source in MEASURED.items() if who.split(",")[0] == kernels]
        return min(inverse(rows[place]["auto_over_off"]["mean"]) for rows in runs)

    return find


def by_rate_and_run() -> list[tuple[float, float, float]]:
    """The default's speed over the best other length, at each rate of each stored run."""
    return [inverse(row["paired"]) for source in MEASURED.values() for row in stored(source.file)["rows"]]


def over_best_lengths() -> Figure:
    """Of these speeds the median and the extremes."""
    return spread([middle for middle, _, _ in by_rate_and_run()])


def over_best_length() -> Figure:
    """The least of these speeds; of so many one is below 1 by chance alone."""
    return min(by_rate_and_run())


def pooled(system: str, other: str) -> Find:
    """Throughput of a pool over another system, mixed domains."""

    def find() -> Figure:
        pool = Pool(stored("pool"))
        return (pool.value("tokens_per_s", system) / pool.value("tokens_per_s", other),)

    return find


def on_nodes() -> Figure:
    """Throughput of CoSine with four and with eight nodes over the best baseline, at a low and at a high load."""
    sizes = {WHOLE: AT_FOUR, EIGHT: AT_EIGHT}
    loads = [Nodes(stored(name)) for name in NODES]
    return spread([min(load.over(other, own) for other in others) for load in loads for own, others in sizes.items()])


def runs_of(name: str) -> Runs:
    """A stored simulation.

    Raises:
        LookupError: the scenario has changed since.
    """
    found: Any = stored(f"simulations/{name}")
    if found["scenario"] != described(Scenario.read(Path(FOLDER / f"{name}.yaml"))):
        raise LookupError(name)
    return Runs(found)


def throughput(name: str, system: str, other: str) -> Find:
    """Simulated throughput of a variant over another, at the only load."""

    def find() -> Figure:
        runs = runs_of(name)
        return (runs.throughput(system) / runs.throughput(other),)

    return find


def offline(other: str) -> Find:
    """Simulated throughput of CoSine over another system, over the batches."""

    def find() -> Figure:
        runs = runs_of("cosine-cost")
        return spread([runs.throughput("cosine", batch) / runs.throughput(other, batch) for batch in BATCHES])

    return find


def at_equal_cost() -> Figure:
    """CoSine's simulated tokens for a price over those of the cheapest baseline, over the batches."""
    runs = runs_of("cosine-cost")
    cheapest = {batch: min(runs.price(name, batch) for name in BASELINES) for batch in BATCHES}
    return spread([cheapest[batch] / runs.price("cosine", batch) for batch in BATCHES])


def latency_of_baselines() -> Figure:
    """The simulated latency of the fastest baseline over CoSine's, over the batches."""
    runs = runs_of("cosine-cost")
    fastest = {batch: min(runs.latency(name, batch) for name in BASELINES) for batch in BATCHES}
    return spread([fastest[batch] / runs.latency("cosine", batch) for batch in BATCHES])


def online(mode: str, *others: str) -> Find:
    """The simulated latency of the fastest of some systems over CoSine's fused trees, in a mode of arrival.

    Args:
        others: by name; none: all baselines.
    """

    def find() -> Figure:
        runs = runs_of(f"cosine-{mode}")
        return (min(map(runs.latency, others or cosine_online.BASELINES)) / runs.latency("cosine fused"),)

    return find


def over_fastest() -> Figure:
    """The same over all baselines, over the modes of arrival."""
    return spread([online(mode)()[0] for mode in cosine_online.MODES])


def blended(setting: str, temperature: float) -> Find:
    """Speed of the default proposals over standard decoding, all domains, one request at a time, in the worst run."""

    def find() -> Figure:
        return min([ways(name, setting, temperature)["alternate"] for name in COLLABORATIVE])

    return find


def default_over(other: str, temperatures: Sequence[float]) -> Find:
    """Speed of the default proposals over another way, contrastive, one request at a time, at some temperatures."""

    def find() -> Figure:
        found = [ways(name, "contrastive", temperature) for name in COLLABORATIVE for temperature in temperatures]
        ratios = [each["alternate"][0] / each[other][0] for each in found]
        return spread(ratios)

    return find


def ways(name: str, setting: str, temperature: float) -> Mapping[str, tuple[float, ...]]:
    """Speed of each way of decoding with several models over the standard one, all domains, in the run ``name``.

    Raises:
        LookupError: it was not measured.
    """
    for row in stored(name)["settings"][setting]:
        if (row["batch"], row["temperature"], row["domain"]) == (1, temperature, "all"):
            return {name: tuple(figure) for name, figure in row["over_standard"].items()}
    raise LookupError(setting)


def relaxed(lossless: bool) -> Find:
    """The largest speed of adaptive verification over one target with a drafter, of the bounds that relax.

    Args:
        lossless: only of bounds whose loss on reference answers has an interval that reaches zero.
    """

    def find() -> Figure:
        best = fastest_relaxed(stored("dsd_law"), "speed_over_one_target", lossless)["speed_over_one_target"]
        return best["ratio"], best["low"], best["high"]

    return find


def pipelines() -> Figure:
    """Throughput of all pipelines on two shared cores over turns, batches 8 and 16."""
    batches = stored("pipelining")["batches"].values()
    return spread([way["speed"] for found in batches for name, way in found.items() if name.startswith("pipelined")])


def compared(name: str, system: str, other: str) -> Find:
    """Speed of a configuration over another one in ``cospec bench compare``."""

    def find() -> Figure:
        for row in stored(name)["ratios"]:
            if (row["system"], row["baseline"], row["cost"]) == (system, other, "time_per_token"):
                return row["ratio"], row["low"], row["high"]
        raise LookupError(system)

    return find


def over_links() -> Figure:
    """Speed of windows over one token per traversal on 4 and 8 nodes, over all delays of links."""
    return spread(
        [
            row["measured"]["off"]["token"] / row["measured"]["fixed"]["token"]
            for pipeline in stored("dsd")["pipelines"]
            for row in pipeline["rows"]
            if pipeline["nodes"]["count"] >= 4
        ]
    )
