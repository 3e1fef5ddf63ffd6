"""CoSine by mode of arrival, simulated: throughput, acceptance, idle time and price, and CoSine without each part."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers import cosine_nodes
from benchmarks.papers.common import Row, Section
from benchmarks.papers.cosine_online import BASELINES, MODES, POOLS, WORDS
from benchmarks.papers.scenarios import Runs
from benchmarks.papers.sources import Results

FUSED = "cosine fused"
WITHOUT = {  # variants, and what each is a part of
    "without routing": FUSED,
    "without fusion": FUSED,
    "without pipelining": FUSED,
    "without adaptive participation": "cosine",  # of vote
}
PAPERS = {"price of a million tokens": "a picture of a table (table 3)"}
FIGURES: dict[str, Callable[[Runs, str], str]] = {
    "throughput in tokens/s": lambda runs, name: f"{runs.throughput(name):.0f}",
    "acceptance length": lambda runs, name: f"{runs.at(name)['mean_acceptance_length']:.2f}",
    "idle time of the target": lambda runs, name: f"{runs.at(name)['target_idle']:.0%}",
    "idle time of the drafters": lambda runs, name: nodes_idle(runs, name),
    "price of a million tokens": lambda runs, name: f"{runs.price(name):.2f}",
}


def sections(results: Results) -> tuple[Section, Section]:
    """All systems, and the ablation."""
    return systems(results), ablation(results)


def systems(results: Results) -> Section:
    """Figures of every system, and what makes the difference to the best baseline."""
    rows: list[Row] = []
    for mode, source in MODES.items():
        rows += [
            results.row(
                f"{mode}: {figure}",
                PAPERS.get(figure, ""),
                source,
                lambda found, pick=pick: ", ".join(f"{words} {pick(Runs(found), n)}" for n, words in WORDS.items()),
            )
            for figure, pick in FIGURES.items()
        ]
        rows += [
            results.row(
                f"{mode}: throughput of {words} over the baseline with the most throughput, by parts",
                "",
                source,
                lambda found, name=name: over_most(Runs(found), name),
            )
            for name, words in POOLS.items()
        ]
    return Section(
        "Figure 7 and table 3: throughput, acceptance, idle time and price by mode of arrival",
        tuple(rows),
        "The scenarios are those of figure 7; the paper's table 3 is of online serving too. The target is idle while "
        "it computes no forward, which includes the engine's own time and times without a request; the drafters' share "
        "is the mean over their nodes. Prices per hour are assumed: 6 for the target, 0.15 for each drafter. At all "
        "three arrivals all systems keep up in the end. So throughput and price say how soon the last requests end. "
        "The parts of a throughput multiply to its ratio.",
    )


def ablation(results: Results) -> Section:
    """CoSine without each part, at each mode of arrival."""
    rows = [
        results.row(
            f"{mode}: {name}, of {WORDS[whole]}",
            cosine_nodes.PARTS.get(name, ""),
            source,
            lambda found, name=name, whole=whole: changed(Runs(found), name, whole),
        )
        for mode, source in MODES.items()
        for name, whole in WITHOUT.items()
    ]
    return Section(
        "Ablation by mode of arrival, simulated",
        tuple(rows),
        "Routing `all` stands for no routing, one drafter per request for no fusion, drafting and verification in turn "
        f"for no pipelining. {cosine_nodes.WHOLE_DRAFTS} So no fusion takes away the join of whole drafts. Without "
        "routing all drafters draft, so trees are larger and verification takes longer; acceptance is not worse. The "
        "paper names less relevant drafts as the reason. With adaptive participation goodput chooses the number of "
        "drafters of a request with the length (CoSine section 4.3); without, the routing alone chooses the drafters, "
        "at every load. The paper does not say of which arrivals its ablation is. Its first part is the whole "
        "cooperative generation, which is more than routing. All variants keep up with these arrivals, so their "
        "throughput can hardly change; compare latency. The emulated rows above have the throughput of a full batch. "
        "Each variant ran once, with 600 requests, so differences of a percent say little.",
    )


def nodes_idle(runs: Runs, name: str) -> str:
    """The share of time in which a drafter's node does not draft."""
    share = runs.at(name)["drafters_idle"]
    return "without" if share is None else f"{share:.0%}"


def over_most(runs: Runs, name: str) -> str:
    """Throughput over that of the baseline with the most, by parts."""
    best = max(BASELINES, key=runs.throughput)
    return f"{runs.by_parts(name, best)} ({BASELINES[best]})"


def changed(runs: Runs, name: str, whole: str) -> str:
    """Changes without a part."""
    changes = {
        "latency": runs.latency(name) / runs.latency(whole),
        "throughput": runs.throughput(name) / runs.throughput(whole),
        "acceptance length": runs.at(name)["mean_acceptance_length"] / runs.at(whole)["mean_acceptance_length"],
    }
    cells = ", ".join(f"{ratio - 1:+.1%} {figure}" for figure, ratio in changes.items())
    drafted = f"drafted {runs.at(name)['mean_k']:.1f} instead of {runs.at(whole)['mean_k']:.1f}"
    return f"{cells}; {drafted}; nodes idle {nodes_idle(runs, name)} instead of {nodes_idle(runs, whole)}"
