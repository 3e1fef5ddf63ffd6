"""Our figures for the headline claims of the papers, as factors from the stored results; above 1 is a gain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.headlines import stored
from benchmarks.papers import cosine_online
from benchmarks.papers.collaborations import PAIRED, Collaborations
from benchmarks.papers.collaborations import default_over as default_over_other
from benchmarks.papers.comparisons import fastest_relaxed
from benchmarks.papers.cos_settings import SETTINGS
from benchmarks.papers.cosine_nodes import AFTER_OUTCOMES, AT_EIGHT, EIGHT, SOURCES, SPECINFER, WHOLE, Nodes
from benchmarks.papers.cosine_nodes import BASELINES as AT_FOUR
from benchmarks.papers.cosine_offline import BASELINES, BATCHES
from benchmarks.papers.large_targets import LLAMA, llama_scenario
from benchmarks.papers.pools import Pool
from benchmarks.papers.scenarios import FOLDER, Runs, described
from benchmarks.papers.smartspec_rates import MEASURED
from benchmarks.pipelining import DOUBLED
from cospec.simulation.scenario import Scenario

COLLABORATIVE = "collaborative", "collaborative_avx2"  # runs of one benchmark
ADAPTED = "weighted-two"  # the target and the target with an adapter
Figure = Sequence[float]  # one value, or a value and the ends of its interval
Find = Callable[[], Sequence[Figure]]  # one figure for each setting


def inverse(row: Mapping[str, float]) -> tuple[float, float, float]:
    """A ratio of latencies as a factor of speed."""
    return 1 / row["ratio"], 1 / row["high"], 1 / row["low"]


def under_load(kernels: str, place: int) -> Find:
    """The default's speed over no speculation in each run; ``place`` counts the rates, slowest first."""

    def find() -> Sequence[Figure]:
        runs = [stored(source.file)["rows"] for who, source in MEASURED.items() if who.startswith(kernels)]
        return [inverse(rows[place]["auto_over_off"]["mean"]) for rows in runs]

    return find


def between() -> Sequence[Figure]:
    """The default's speed over no speculation, at the rates between the lowest and the highest of each stored run."""
    return [
        inverse(row["auto_over_off"]["mean"])
        for source in MEASURED.values()
        for row in stored(source.file)["rows"][1:-1]
    ]


def over_best_lengths() -> Sequence[Figure]:
    """The default's speed over the best other length, at each rate of each stored run: ratios of mean latencies."""
    return [
        inverse(row["auto_over_best"]["mean"]) for source in MEASURED.values() for row in stored(source.file)["rows"]
    ]


def pooled(other: str, *systems: str) -> Find:
    """Throughput of each of some pools over another system, mixed domains."""

    def find() -> Sequence[Figure]:
        pool = Pool(stored("pool"))
        return [(pool.value("tokens_per_s", name) / pool.value("tokens_per_s", other),) for name in systems]

    return find


# CoSine with four and with eight nodes, and the baselines; then drafts after outcomes in place of the pipeline.
SIZES: Mapping[str, Iterable[str]] = {WHOLE: AT_FOUR, EIGHT: AT_EIGHT}
AFTER: Mapping[str, Iterable[str]] = {AFTER_OUTCOMES: AT_FOUR}


def on_nodes(sizes: Mapping[str, Iterable[str]], *loads: int) -> Find:
    """Throughput of systems over SpecInfer with as many nodes, in each run.

    Args:
        loads: requests at once.
    """

    def find() -> Sequence[Figure]:
        found = [Nodes(stored(SOURCES[load].file)) for load in loads]
        pairs = [(own, next(iter(others))) for own, others in sizes.items()]
        return [(each,) for load in found for pair in pairs for each in load.ratios("tokens_per_second", *pair)]

    return find


def latency_on_nodes(sizes: Mapping[str, Iterable[str]], *loads: int) -> Find:
    """The mean latency of the best baseline over that of systems, in each run."""

    def find() -> Sequence[Figure]:
        found = list[Figure]()
        for load in [Nodes(stored(SOURCES[each].file)) for each in loads]:
            for own, others in sizes.items():
                best = min(others, key=lambda name: load.value("mean_latency", name))
                found += [(each,) for each in load.ratios("mean_latency", best, own)]
        return found

    return find


def online_nodes(system: str) -> Find:
    """SpecInfer's latency over that of a system on emulated nodes, in each mode of arrival, with its interval."""

    def find() -> Sequence[Figure]:
        modes = stored("cosine_online")["modes"].values()
        return [inverse(mode[system]["latency_over"][SPECINFER]) for mode in modes]

    return find


def runs_of(name: str) -> Runs:
    """The stored simulation of a scenario of the examples.

    Raises:
        LookupError: the scenario has changed since.
    """
    return fresh(f"simulations/{name}", Scenario.read(Path(FOLDER / f"{name}.yaml")))


def fresh(file: str, scenario: Scenario) -> Runs:
    """The stored simulation of a scenario.

    Raises:
        LookupError: the scenario has changed since.
    """
    found: Any = stored(file)
    if found["scenario"] != described(scenario):
        raise LookupError(file)
    return Runs(found)


def throughput(name: str, system: str, other: str) -> Find:
    """Simulated throughput of a variant over another, at the only load."""

    def find() -> Sequence[Figure]:
        runs = runs_of(name)
        return ((runs.throughput(system) / runs.throughput(other),),)

    return find


def offline(other: str) -> Find:
    """Simulated throughput of CoSine over another system, at each batch."""

    def find() -> Sequence[Figure]:
        runs = runs_of("cosine-cost")
        return [(runs.throughput("cosine", batch) / runs.throughput(other, batch),) for batch in BATCHES]

    return find


def at_equal_cost(system: str = "cosine", drafts: str = "assumed") -> Find:
    """The simulated tokens of a system for a price over those of the cheapest baseline, at each batch.

    Args:
        drafts: the time of a draft token, ``assumed`` or ``computed`` from the drafter's size.
    """

    def find() -> Sequence[Figure]:
        runs = runs_of("cosine-cost") if drafts == "assumed" else fresh(LLAMA.file, llama_scenario())
        cheapest = {batch: min(runs.price(name, batch) for name in BASELINES) for batch in BATCHES}
        return [(cheapest[batch] / runs.price(system, batch),) for batch in BATCHES]

    return find


def online(system: str, *others: str) -> Find:
    """The simulated latency of the fastest of some systems over that of a pool, in each mode of arrival.

    Args:
        others: by name; none: all baselines.
    """

    def find() -> Sequence[Figure]:
        each = [runs_of(f"cosine-{mode}") for mode in cosine_online.MODES]
        return [(min(map(runs.latency, others or cosine_online.BASELINES)) / runs.latency(system),) for runs in each]

    return find


def blended(setting: str, temperature: float) -> Find:
    """Speed of the default proposals over standard decoding, all domains, one request at a time, in the worst run."""

    def find() -> Sequence[Figure]:
        return (min(ways(name, setting, temperature)["alternate"] for name in COLLABORATIVE),)

    return find


def default_over(other: str, *settings: tuple[str, float]) -> Find:
    """Speed of the default proposals over another way, one request at a time, in settings at some temperatures.

    A run without paired ratios has both as speeds over standard decoding. Then the ends are those of each speed's
    interval over the other's middle, the wider of both: they include 1 where one figure lies in the other's interval.
    """

    def find() -> Sequence[Figure]:
        found = [row_of(name, *setting) for name in COLLABORATIVE for setting in settings]
        return [paired(row, other) for row in found]

    return find


def paired(row: Mapping[str, Any], other: str) -> Figure:
    """Speed of the default over another way, with its ends."""
    speeds = row["over_standard"]
    return default_over_other(row, other) if PAIRED in row else ratio(speeds["alternate"], speeds[other])


def ratio(own: Figure, base: Figure) -> Figure:
    """One speed over another, with such ends."""
    (middle, low, high), (other, least, most) = own, base
    return middle / other, min(low / other, middle / most), max(high / other, middle / least)


def row_of(name: str, setting: str, temperature: float) -> Mapping[str, Any]:
    """The ways of decoding with several models, one request at a time, all domains, in the run ``name``.

    Raises:
        LookupError: it was not measured.
    """
    for row in stored(name)["settings"][setting]:
        if (row["batch"], row["temperature"], row["domain"]) == (1, temperature, "all"):
            return dict(row)
    raise LookupError(setting)


def ways(name: str, setting: str, temperature: float) -> Mapping[str, tuple[float, ...]]:
    """Speed of each way over the standard one; see ``row_of``."""
    return {name: tuple(figure) for name, figure in row_of(name, setting, temperature)["over_standard"].items()}


def least_blended() -> Sequence[Figure]:
    """The default's least speed over standard decoding with eight requests, over settings and temperatures, by run."""
    runs = [stored(name) for name in COLLABORATIVE]
    return [min(Collaborations(found, setting.name).least(8) for setting in SETTINGS) for found in runs]


def notes() -> Sequence[str]:
    """Conditions of the stored runs that a reader of the figures has to know; empty ones do not hold any more."""
    runs = [stored(name) for name in COLLABORATIVE]
    rows = [row["theory"] for run in runs for row in Collaborations(run, ADAPTED).rows(1.0, 1) if "theory" in row]
    pairs = [zip(row["alpha"], row["gammas"], strict=True) for row in rows]
    alphas = [alpha for each in pairs for alpha, gamma in each if gamma]
    return (f"CoS's adapter had 50 training steps; estimated acceptance is {min(alphas):.2f} to {max(alphas):.2f}.",)


def relaxed(lossless: bool) -> Find:
    """The largest speed of adaptive verification over one target with a drafter, of the bounds that relax.

    Args:
        lossless: only of bounds whose loss on reference answers has an interval that reaches zero.
    """

    def find() -> Sequence[Figure]:
        best = fastest_relaxed(stored("dsd_law"), "speed_over_one_target", lossless)["speed_over_one_target"]
        return ((best["ratio"], best["low"], best["high"]),)

    return find


def pipelines() -> Sequence[Figure]:
    """Throughput of the pipeline over turns at each batch of the target, so with twice the requests; with a thread."""
    ways = [found[DOUBLED] for found in stored("pipelining")["batches"].values()]
    return [(way["speed"], *way["speed_interval"]) for way in ways]


def compared(name: str, system: str, other: str) -> Find:
    """Speed of a configuration over another one in ``cospec bench compare``."""

    def find() -> Sequence[Figure]:
        for row in stored(name)["ratios"]:
            if (row["system"], row["baseline"], row["cost"]) == (system, other, "time_per_token"):
                return ((row["ratio"], row["low"], row["high"]),)
        raise LookupError(system)

    return find


def over_links() -> Sequence[Figure]:
    """Speed of windows over one token per traversal on 4 and 8 nodes, at all delays of links."""
    return [
        (row["measured"]["off"]["token"] / row["measured"]["fixed"]["token"],)
        for name in ("dsd", "dsd_regime")
        for pipeline in stored(name)["pipelines"]
        for row in pipeline["rows"]
        if pipeline["nodes"]["count"] >= 4 and row["t1"] > 0
    ]
