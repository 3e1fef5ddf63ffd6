"""The headline claims of the five papers, each with our figure and a verdict that follows from the figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.headlines import stored
from benchmarks.papers.pools import Pool
from benchmarks.papers.scenarios import FOLDER, Runs, described
from cospec.simulation.scenario import Scenario

DOUBT = 0.05  # relative error of a figure without an interval, as `benchmarks.fidelity` finds for the simulator
MEASURED, EMULATED, SIMULATED = "measured", "emulated", "simulated"


@dataclass(frozen=True, slots=True)
class Claim:
    """One headline.

    Attributes:
        said: the paper's range, as factors; above 1 is a gain.
        find: the same factor here, with the ends of its interval where there is one. ``LookupError`` or
            ``FileNotFoundError``: it was not run.
    """

    paper: str
    what: str
    said: tuple[float, float]
    how: str
    find: Callable[[], Sequence[float]]

    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        said = f"{self.said[0]:.2f} to {self.said[1]:.2f}×" if len(set(self.said)) > 1 else f"{self.said[0]:.2f}×"
        try:
            found = self.find()
        except (LookupError, FileNotFoundError):
            return self.paper, self.what, said, "", "not run", "not shown"
        ours = f"{found[0]:.2f}×" + (f" ({found[1]:.2f} to {found[2]:.2f})" if len(found) > 1 else "")
        return self.paper, self.what, said, ours, self.how, verdict(found, self.said[0])


def verdict(found: Sequence[float], least: float) -> str:
    """What a figure and its interval say of a claim of at least ``least``."""
    if found[0] >= least:
        return "as the paper"
    low, high = (min(found), max(found)) if len(found) > 1 else (found[0] * (1 - DOUBT), found[0] * (1 + DOUBT))
    if low > 1.0:
        return "a gain, smaller than the paper's"
    return "no clear difference" if high >= 1.0 else "a loss here"


def claims() -> str:
    """One table."""
    lines = ["| paper | claim | theirs | ours | how | verdict |", "| --- | --- | --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(claim.cells()) + " |" for claim in CLAIMS]
    return "\n".join([*lines, ""])


def inverse(row: Mapping[str, float]) -> tuple[float, float, float]:
    """A ratio of latencies as a factor of speed."""
    return 1 / row["ratio"], 1 / row["high"], 1 / row["low"]


def under_load() -> Iterator[tuple[float, float, float]]:
    """The default's speed over no speculation by rate, slowest rate first."""
    for row in stored("load_2-x-amd-epyc_avx512_bf16")["rows"]:
        yield inverse(row["auto_over_off"]["mean"])


def pooled(system: str, other: str) -> Callable[[], Sequence[float]]:
    """Throughput of a pool over another system, mixed domains."""

    def find() -> Sequence[float]:
        pool = Pool(stored("pool"))
        return (pool.value("tokens_per_s", system) / pool.value("tokens_per_s", other),)

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


def throughput(name: str, system: str, other: str, load: float | None = None) -> Callable[[], Sequence[float]]:
    """Simulated throughput of a variant over another, at the only load or at ``load``."""

    def find() -> Sequence[float]:
        runs = runs_of(name)
        return (runs.throughput(system, load) / runs.throughput(other, load),)

    return find


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


def relaxed() -> Sequence[float]:
    """The largest speed of adaptive verification over exact verification, at a divergence above 0 and up to 0.1."""
    rows = [row["speed"] for row in stored("dsd_law")["rows"] if 0 < row["max_divergence"] <= 0.1]
    best = max(rows, key=lambda row: float(row["ratio"]))
    return best["ratio"], best["low"], best["high"]


def pipelines(name: str = "pipelined, thread") -> Sequence[float]:
    """Throughput of the pipeline on two shared cores, batch 8."""
    way = stored("pipelining")["batches"]["8"][name]
    return way["speed"], *way["speed_interval"]


def slope_over_four() -> Sequence[float]:
    """Speed of lengths by slope over four drafted tokens, eight requests at once."""
    for row in stored("compare_slope_batch8")["ratios"]:
        if (row["system"], row["baseline"], row["cost"]) == ("slope", "draft-4", "time_per_token"):
            return row["ratio"], row["low"], row["high"]
    raise LookupError("slope")


def over_links() -> Sequence[float]:
    """Speed of windows over one token per traversal, median, least and most, on 4 and 8 nodes with slow links."""
    speeds = [
        row["measured"]["off"]["token"] / row["measured"]["fixed"]["token"]
        for pipeline in stored("dsd")["pipelines"]
        for row in pipeline["rows"]
        if pipeline["nodes"]["count"] >= 4 and row["ratio"] >= 3
    ]
    return median(speeds), min(speeds), max(speeds)


CLAIMS = (
    Claim("SmartSpec", "latency at the lowest rate, over no speculation", (1.2, 3.2), MEASURED,
          lambda: next(under_load())),
    Claim("SmartSpec", "latency at the worst rate, over no speculation", (1.0, 1.0), MEASURED,
          lambda: min(under_load())),
    Claim("Minions", "throughput of vote over one drafter", (1.10, 1.60), MEASURED, pooled("vote hedge", "generic")),
    Claim("Minions", "throughput of slope over s = 4, machines apart", (1.06, 1.35), SIMULATED,
          throughput("minions-fig12", "slope in turn", "s=4 in turn")),
    Claim("Minions", "the same on two shared cores, 8 requests", (1.06, 1.35), MEASURED, slope_over_four),
    Claim("Minions", "pipeline over turns, machines apart", (1.34, 1.55), SIMULATED,
          throughput("minions-fig12", "slope", "slope in turn")),
    Claim("Minions", "pipeline over turns, two shared cores", (1.34, 1.55), MEASURED, pipelines),
    Claim("CoSine", "throughput of fuse over SpecInfer's trees, two shared cores", (1.31, 1.62), MEASURED,
          pooled("fuse hedge", "union hedge")),
    Claim("CoSine", "throughput over SpecInfer, 16 requests", (1.31, 1.62), SIMULATED,
          throughput("cosine-cost", "cosine", "specinfer")),
    Claim("CoSine", "throughput over PipeInfer, 16 requests", (1.24, 1.46), SIMULATED,
          throughput("cosine-cost", "cosine", "pipeinfer")),
    Claim("CoSine", "throughput over plain decoding, 16 requests", (3.15, 4.71), SIMULATED,
          throughput("cosine-cost", "cosine", "plain")),
    *(Claim("CoSine", f"latency over SpecInfer, {mode} arrivals", said, SIMULATED, over_specinfer(mode))
      for mode, said in (("low", (1.2, 1.5)), ("high", (1.3, 1.6)), ("fluctuating", (1.2, 1.4)))),
    Claim("DSD", "speed over plain decoding, 4 to 8 nodes", (1.91, 2.56), EMULATED, over_links),
    Claim("DSD", "adaptive over exact verification", (1.15, 1.20), MEASURED, relaxed),
    Claim("CoS", "two models of one size, T = 1, over standard", (1.34, 1.62), MEASURED, blended("weighted-two", 1.0)),
    Claim("CoS", "contrastive, T = 0, over standard", (1.26, 2.23), MEASURED, blended("contrastive", 0.0)),
)  # fmt: skip
