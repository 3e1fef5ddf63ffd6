"""The headline claims of the five papers, each with our figure and a verdict that follows from the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.headlines import stored
from benchmarks.papers.comparisons import fastest_relaxed
from benchmarks.papers.cosine_nodes import NODES, Nodes
from benchmarks.papers.cosine_offline import BASELINES, BATCHES
from benchmarks.papers.pools import Pool
from benchmarks.papers.scenarios import FOLDER, Runs, described
from cospec.simulation.scenario import Scenario

DOUBT = 0.05  # a figure without an interval says nothing this near to 1; the page states the rule
MEASURED, EMULATED, SIMULATED = "measured", "emulated", "simulated"


@dataclass(frozen=True, slots=True)
class Claim:
    """One headline.

    Attributes:
        said: the paper's range, as factors; above 1 is a gain. A range from 1 is a claim of "up to".
        find: the same factor here, with the ends of its interval where there is one. ``LookupError`` or
            ``FileNotFoundError``: it was not run.
        spread: what follows the figure is the least and the most of several settings, not an interval.
        comparable: whether both sides are of one kind.
    """

    paper: str
    what: str
    said: tuple[float, float]
    how: str
    find: Callable[[], Sequence[float]]
    spread: bool = False
    comparable: bool = True

    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        low, high = self.said
        said = f"{low:.2f} to {high:.2f}×" if 1 != low < high else f"up to {high:g}×" if low < high else f"{low:.2f}×"
        try:
            found = self.find()
        except (LookupError, FileNotFoundError):
            return self.paper, self.what, said, "", "not run", "not shown"
        form = "least {1:.2f}, most {2:.2f}" if self.spread else "{1:.2f} to {2:.2f}"
        ours = f"{found[0]:.2f}×" + (f" ({form.format(*found)})" if len(found) > 1 else "")
        return self.paper, self.what, said, ours, self.how, verdict(found, low) if self.comparable else "not comparable"


def verdict(found: Sequence[float], least: float) -> str:
    """What a figure and its interval say of a claim of at least ``least``; the page states the same rule."""
    low, high = (min(found), max(found)) if len(found) > 1 else (found[0] - DOUBT, found[0] + DOUBT)
    if low <= 1.0 <= high:
        return "no clear difference"
    if high < 1.0:
        return "a loss here"
    return "as the paper" if found[0] >= least else "a gain, smaller than the paper's"


def claims() -> str:
    """One table."""
    lines = ["| paper | claim | theirs | ours | how | verdict |", "| --- | --- | --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(claim.cells()) + " |" for claim in CLAIMS]
    return "\n".join([*lines, ""])


def spread(found: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most of several settings."""
    return median(found), min(found), max(found)


def inverse(row: Mapping[str, float]) -> tuple[float, float, float]:
    """A ratio of latencies as a factor of speed."""
    return 1 / row["ratio"], 1 / row["high"], 1 / row["low"]


def under_load() -> list[tuple[float, float, float]]:
    """The default's speed over no speculation by rate, slowest rate first."""
    return [inverse(row["auto_over_off"]["mean"]) for row in stored("load_2-x-amd-epyc_avx512_bf16")["rows"]]


def pooled(system: str, other: str) -> Callable[[], Sequence[float]]:
    """Throughput of a pool over another system, mixed domains."""

    def find() -> Sequence[float]:
        pool = Pool(stored("pool"))
        return (pool.value("tokens_per_s", system) / pool.value("tokens_per_s", other),)

    return find


def on_nodes(other: str) -> Callable[[], Sequence[float]]:
    """Throughput of CoSine with four nodes over another system, at a low and at a high load."""

    def find() -> Sequence[float]:
        loads = [Nodes(stored(name)) for name in NODES]
        return spread([load.over(other) for load in loads])

    return find


def runs_of(name: str) -> Runs:
    """A stored simulation.

    Raises:
        LookupError: the scenario has changed since.
    """
    found: Any = stored(f"simulations/{name}")
    if found["scenario"] != described(Scenario.read(Path(FOLDER / f"{name}.yaml"))):
        raise LookupError(name)
    return Runs(found)


def throughput(name: str, system: str, other: str) -> Callable[[], Sequence[float]]:
    """Simulated throughput of a variant over another, at the only load."""

    def find() -> Sequence[float]:
        runs = runs_of(name)
        return (runs.throughput(system) / runs.throughput(other),)

    return find


def offline(other: str) -> Callable[[], Sequence[float]]:
    """Simulated throughput of CoSine over another system, over the batches."""

    def find() -> Sequence[float]:
        runs = runs_of("cosine-cost")
        return spread([runs.throughput("cosine", batch) / runs.throughput(other, batch) for batch in BATCHES])

    return find


def at_equal_cost() -> Sequence[float]:
    """CoSine's simulated tokens for a price over those of the cheapest baseline, over the batches."""
    runs = runs_of("cosine-cost")
    cheapest = {batch: min(runs.price(name, batch) for name in BASELINES) for batch in BATCHES}
    return spread([cheapest[batch] / runs.price("cosine", batch) for batch in BATCHES])


def over_specinfer(mode: str) -> Callable[[], Sequence[float]]:
    """The simulated latency of SpecInfer over that of CoSine's fused trees, pipelined, in one mode of arrival."""

    def find() -> Sequence[float]:
        runs = runs_of(f"cosine-{mode}")
        return (runs.latency("specinfer") / runs.latency("cosine fused"),)

    return find


def blended(setting: str, temperature: float) -> Callable[[], Sequence[float]]:
    """Speed of alternating proposals over standard decoding, one request at a time, all domains."""

    def find() -> Sequence[float]:
        for row in stored("collaborative")["settings"][setting]:
            if (row["batch"], row["temperature"], row["domain"]) == (1, temperature, "all"):
                return tuple(row["over_standard"]["alternate"])
        raise LookupError(setting)

    return find


def relaxed(lossless: bool) -> Callable[[], Sequence[float]]:
    """The largest speed of adaptive verification over one target with a drafter, of the bounds that relax.

    Args:
        lossless: only of bounds whose loss on reference answers has an interval that reaches zero.
    """

    def find() -> Sequence[float]:
        found = stored("dsd_law")
        rows = [row for row in found["rows"] if not lossless or row["loss"]["low"] <= 0]
        best = fastest_relaxed({**found, "rows": rows}, "speed_over_one_target")["speed_over_one_target"]
        return best["ratio"], best["low"], best["high"]

    return find


def pipelines(name: str = "pipelined, thread") -> Sequence[float]:
    """Throughput of the pipeline on two shared cores, batch 8."""
    way = stored("pipelining")["batches"]["8"][name]
    return way["speed"], *way["speed_interval"]


def compared(name: str, system: str, other: str) -> Callable[[], Sequence[float]]:
    """Speed of a configuration over another one in ``cospec bench compare``."""

    def find() -> Sequence[float]:
        for row in stored(name)["ratios"]:
            if (row["system"], row["baseline"], row["cost"]) == (system, other, "time_per_token"):
                return row["ratio"], row["low"], row["high"]
        raise LookupError(system)

    return find


def over_links() -> Sequence[float]:
    """Speed of windows over one token per traversal on 4 and 8 nodes with slow links."""
    return spread(
        [
            row["measured"]["off"]["token"] / row["measured"]["fixed"]["token"]
            for pipeline in stored("dsd")["pipelines"]
            for row in pipeline["rows"]
            if pipeline["nodes"]["count"] >= 4 and row["ratio"] >= 3
        ]
    )


CLAIMS = (
    Claim("SmartSpec", "latency at the lowest rate, over no speculation", (1.2, 3.2), MEASURED,
          lambda: under_load()[0]),
    Claim("SmartSpec", "latency at the highest rate, over no speculation", (1.0, 1.0), MEASURED,
          lambda: under_load()[-1]),
    Claim("SmartSpec", "the same at the worst of four rates, chosen after the run", (1.0, 1.0), MEASURED,
          lambda: min(under_load())),
    Claim("Minions", "throughput of vote over one drafter, two shared cores", (1.10, 1.60), MEASURED,
          pooled("vote hedge", "generic")),
    Claim("Minions", "throughput of slope over s = 4, machines apart", (1.06, 1.35), SIMULATED,
          throughput("minions-fig12", "slope in turn", "s=4 in turn")),
    *(Claim("Minions", f"the same on two shared cores, batch {batch}", (1.06, 1.35), MEASURED,
            compared(f"compare_slope_batch{batch}", "slope", "draft-4")) for batch in (1, 8)),
    Claim("Minions", "pipeline with 32 requests over turns with 16, machines apart", (1.34, 1.55), SIMULATED,
          throughput("minions-fig12", "slope", "slope in turn")),
    Claim("Minions", "pipeline over turns, two shared cores", (1.34, 1.55), MEASURED, pipelines),
    Claim("CoSine", "throughput of fuse over SpecInfer, two shared cores", (1.31, 1.62), MEASURED,
          pooled("fuse hedge", "union all")),
    Claim("CoSine", "throughput over SpecInfer, drafters on nodes", (1.31, 1.62), EMULATED,
          on_nodes("SpecInfer, 4 nodes"), spread=True),
    Claim("CoSine", "throughput over PipeInfer, drafters on nodes", (1.24, 1.46), EMULATED, on_nodes("PipeInfer"),
          spread=True),
    *(Claim("CoSine", f"throughput over {name}, batches of 1 to 16", said, SIMULATED, offline(other), spread=True)
      for name, other, said in (("SpecInfer", "specinfer", (1.31, 1.62)), ("PipeInfer", "pipeinfer", (1.24, 1.46)),
                                ("plain decoding", "plain", (3.15, 4.71)))),
    Claim("CoSine", "throughput at equal cost, over the best baseline", (1.0, 1.325), SIMULATED, at_equal_cost,
          spread=True),
    *(Claim("CoSine", f"latency over SpecInfer, {mode} arrivals", said, SIMULATED, over_specinfer(mode))
      for mode, said in (("low", (1.2, 1.5)), ("high", (1.3, 1.6)), ("fluctuating", (1.2, 1.4)))),
    Claim("DSD", "speed over plain decoding, one machine without links", (1.91, 2.56), MEASURED,
          compared("compare_batch1", "draft-4", "off")),
    Claim("DSD", "the same over 4 and 8 nodes, with injected times and acceptance", (1.91, 2.56), EMULATED, over_links,
          spread=True, comparable=False),
    Claim("DSD", "adaptive over exact verification, no clear loss", (1.15, 1.20), MEASURED, relaxed(True)),
    Claim("DSD", "the same, with a loss", (1.15, 1.20), MEASURED, relaxed(False)),
    Claim("CoS", "two models of one size, T = 1, over standard", (1.34, 1.62), MEASURED, blended("weighted-two", 1.0)),
    Claim("CoS", "contrastive, T = 0, over standard", (1.26, 2.23), MEASURED, blended("contrastive", 0.0)),
)  # fmt: skip
