"""SmartSpec: speculation length by goodput. ``python -m benchmarks.papers.smartspec [--run]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.papers import large_targets
from benchmarks.papers import smartspec_figures as figures
from benchmarks.papers.command import main
from benchmarks.papers.common import PLOT, Page, Row, Section, paragraph
from benchmarks.papers.confidences import distributions
from benchmarks.papers.curves import Curves
from benchmarks.papers.not_run import remaining
from benchmarks.papers.scenarios import Runs, scenario
from benchmarks.papers.smartspec_claims import GRID, SERVED, ZOO, claims
from benchmarks.papers.smartspec_loads import ORACLE, low_acceptance, swapping
from benchmarks.papers.smartspec_rates import FIXED, SIMULATED, by_steps, rates, simulated_curves
from benchmarks.papers.sources import Found, Results, Source
from cospec.drafters.medusa import level_paths
from cospec.policies.goodput.draft_shapes import nodes, tree_tokens

FIDELITY = Source("fidelity", "python -m benchmarks.fidelity")
TREES, TREES_LESS = (scenario(f"smartspec-fig{number}") for number in (15, 16))
HEADS = Source("heads", "python -m benchmarks.heads")
SOURCES = (
    figures.GRANULARITY,
    *(GRID, *SIMULATED.values(), large_targets.MIXTURE, figures.LOOKUP),
    *(ORACLE, TREES, TREES_LESS, ZOO, figures.PROFILE),
)
BATCHES = (1, 4, 16, 32, 64, 128, 256)  # of figure 5, computed
COUNTED = "counted in the tree that the drafter of heads builds"


def page(results: Results) -> Page:
    """The tables and figures of the paper that have numbers or a claim that can be checked."""
    sections = (
        rates(results),
        steps(results),
        lengths(results),
        model(results),
        lookup(results),
        predictors(results),
        trees(results),
        heads(results),
        expectations(results),
        distributions(results),
        remaining(results, "smartspec", swapping(), *low_acceptance(results), *claims(results)),
    )
    return Page("smartspec", "SmartSpec", sections, results.here)


def steps(results: Results) -> Section:
    """Figure 3."""
    rows = [
        results.row(
            f"{rate:g} request{'s' if rate > 1 else ''}/s: tokens of a step, and steps of a request",
            "tokens of a batch grow with k, steps fall",
            SIMULATED["7B"],
            lambda found, rate=rate: "; ".join(batch_and_steps(Runs(found), name, rate) for name in ("off", *FIXED)),
        )
        for rate in (1.0, 8.0, 16.0, 24.0)
    ]
    text = (
        "Figure 3(a) is the average batch size in tokens, figure 3(b) the number of steps. The rates are those of "
        "figure 11 with the 7B target. Tokens of prompts count. Outputs have 128 tokens, with an acceptance of 0.7."
    )
    return Section("Figure 3: batch size and number of steps", tuple(rows), text)


def batch_and_steps(runs: Runs, name: str, rate: float) -> str:
    """Tokens of a mean step, and the steps of a mean request."""
    run = runs.at(name, rate)
    steps = run["rounds"] * run["mean_batch"] / run["requests"]
    return f"{name} {run['mean_batched_tokens']:.0f} tokens, {steps:.0f} steps"


def lengths(results: Results) -> Section:
    """Figure 5."""
    rows = [
        results.computed(
            f"Best length at batch {batch}",
            "more than 4 at small batches" if batch <= 4 else "falls as the batch grows, to 0 at large batches",
            str(figures.best_length(batch)),
        )
        for batch in BATCHES
    ]
    found = results.read(GRID)
    for load in Runs(found).loads if found else (1.0,):
        rows.append(
            results.row(
                f"Tokens per second at batch {load:g}, best fixed length",
                PLOT,
                GRID,
                lambda found, load=load: figures.best_fixed(Runs(found), load),
            )
        )
    return Section(
        "Figure 5: the best proposed length by batch size",
        tuple(rows),
        "The paper does not print the coefficients of its 7B model on an A100. Ours are assumed, in "
        "`examples/scenarios/smartspec-fig5.yaml`. Acceptance is 0.7, as in the paper. The goodput policy's own code "
        f"computes the first {len(BATCHES)} rows, at {figures.CONTEXT} tokens of context. {still_drafting()}"
        "The engine on a virtual clock gives the others. "
        f"{results.sentence(GRID, lambda found: near(Runs(found)))}",
    )


def still_drafting() -> str:
    """Words on the largest batch where drafts pay there; else empty."""
    length = figures.best_length(BATCHES[-1])
    if not length:
        return ""
    return (
        f"At batch {BATCHES[-1]} a length of {length} still pays. The time to read the cached tokens grows with the "
        "batch too, and drafts do not add to it. "
    )


def near(runs: Runs) -> str:
    """How little the paper's lengths above 4 lose at the least batch, in the runs of the engine."""
    own, longer = (runs.throughput(f"k={length}", runs.loads[0]) for length in (4, 5))
    return (
        f"There length 5 has {longer / own:.3f} times the throughput of length 4 at batch {runs.loads[0]:g}. So other "
        "coefficients could make more than 4 the best."
    )


def model(results: Results) -> Section:
    """Figures 7 and 13."""
    rows = [
        results.row(
            f"Median error of the time model on held-out points, {who}",
            "a plot: points near the diagonal",
            figures.PROFILE,
            lambda found, place=place: figures.held_out(found, place),
        )
        for place, who in enumerate(("target", "drafter"))
    ]
    rows.append(
        results.row(
            "Error of the simulated mean latency, same requests",
            "below 10% while the rate is below the service rate, over several lengths",
            FIDELITY,
            figures.fitted_error,
            results.sentence(FIDELITY, one_length),
        )
    )
    found = results.read(ZOO)
    for load in Runs(found).loads if found else (2.0,):
        rows.append(
            results.row(
                f"Latency of the server at {load:g}/s, and the error of a scenario that was not fitted to it",
                "",
                SERVED,
                lambda served, load=load: figures.unfitted_error(served, found, load),
                "compared with `cospec simulate examples/scenarios/zoo.yaml`",
            )
        )
    return Section(
        "Figures 7 and 13: predicted against measured time",
        tuple(rows),
        "The time model is fitted to forwards and drafts, and judged on others. `benchmarks.fidelity` gives the "
        "simulator the arrivals, the output lengths, and which guesses of the drafter are right. Its times come from "
        "runs with other requests. The speed of the machine comes from the run next to it. The paper names profiled "
        "times, data of each job and a calibration. The scenario `zoo` has other prompts, an assumed acceptance and "
        "no HTTP server; how much each of these adds to its error was not measured.",
    )


def one_length(found: Found) -> str:
    """Which lengths the requests had."""
    return "one length: {prompt} tokens in, {tokens} out".format_map(found["options"])


def lookup(results: Results) -> Section:
    """Figure 12."""
    rows = lookup_rows(results, figures.LOOKUP, "Mistral-7B in the paper")
    rows += lookup_rows(results, large_targets.MIXTURE, "Mixtral-8x7B")
    rows += [
        results.computed(
            f"A forward of {tokens} token{'s' if tokens > 1 else ''}, Mixtral-8x7B and all experts read",
            "",
            large_targets.mixture_and_dense(tokens),
        )
        for tokens in (1, 2, 4, 8, 16, 64)
    ]
    return Section(
        "Figure 12: prompt lookup by request rate",
        tuple(rows),
        "The first target is the 7B model of figure 11 with Mistral's time of a cached token, by the same rule. "
        "Mixtral's times on eight A100 are computed from sizes, "
        f"bandwidth and FLOP/s (`benchmarks/papers/large_targets.py`), {large_targets.SHARES}. Each token chooses two "
        "of eight experts at random, and a forward reads the chosen experts. Drafts cost nothing. Inputs have 768 "
        "tokens, outputs 96. The paper fixes HAGRID's outputs at 128 (section 7). "
        "It measured an acceptance of 0.3 to 0.4 for Mistral-7B only; here Mixtral has it "
        "too. It is read as accepted over proposed tokens. With drafts of "
        f"{figures.LOOKUP_LENGTH} the middle means an acceptance of "
        f"{figures.rate_of(figures.LOOKUP_SHARE, figures.LOOKUP_LENGTH)} for each token. "
        f"{results.sentence(large_targets.MIXTURE, lost_lengths)}",
    )


def lost_lengths(found: Found) -> str:
    """Drafted tokens and the parts of a request's speed where a fixed length is faster than goodput."""
    runs, curves = Runs(found), simulated_curves(found)
    cells = []
    for load in sorted(curves.latency):
        ratio, best = curves.against_best(load)
        if round(ratio, 2) > 1.0:
            cells.append(
                f"At {load:g}/s Mixtral's goodput drafts {runs.at(curves.adaptive, load)['mean_k']:.1f} tokens, and "
                f"{best} is {ratio:.2f} times as fast. A request of goodput has a speed of "
                f"{by_steps(runs, curves.adaptive, best, load)}."
            )
    return paragraph(*cells, "Steps without drafts count." if cells else "")


def lookup_rows(results: Results, source: Source, who: str) -> list[Row]:
    """What a sweep of rates with prompt lookup says."""
    found = results.read(source)
    claims: tuple[tuple[str, str, Callable[[Curves], str]], ...] = (
        ("Speedup of the adaptive length over all rates", "the best at every rate", Curves.span),
        (
            "Latency of the adaptive length over the best other's, at its worst rate",
            "at most 1",
            Curves.worst_regret,
        ),
    )
    rows = [
        results.row(f"{what} ({who})", paper, source, lambda found, pick=pick: pick(simulated_curves(found)))
        for what, paper, pick in claims
    ]
    rows += [
        results.row(
            f"Speedups at {load:g}/s ({who})",
            PLOT,
            source,
            lambda found, load=load: simulated_curves(found).row(load),
        )
        for load in (sorted(simulated_curves(found).latency) if found else ())
    ]
    return rows


def predictors(results: Results) -> Section:
    """Figure 14."""
    found = results.read(ORACLE)
    names = [name for name in Runs(found).variants if name != "off"] if found else ["goodput"]
    levels = list(dict.fromkeys(name.partition(" ")[2] for name in names))
    rows = [
        results.row(
            f"Speedup at an acceptance of {level}" if level else "Speedup",
            "random < SmartSpec < oracle",
            ORACLE,
            lambda found, level=level: figures.predictors(Runs(found), level),
        )
        for level in levels
    ]
    return Section(
        "Figure 14: what a better predictor of acceptance could bring",
        tuple(rows),
        "Speedups are of mean latency over no speculation, at 8 requests/s, for the 7B target of figure 11. The paper "
        "shows speedups without numbers.",
    )


def trees(results: Results) -> Section:
    """Figures 15 and 16."""
    rows = []
    claims: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
        ("latency in s", "top-2 and top-3 rise steeply, SmartSpec stays low", figures.mean_latency),
        ("tokens of a batch", "figures 16(a), 16(b): top-2 and top-3 explode, without numbers", figures.batch_tokens),
        ("scored tokens per sequence", "figure 16(c): SmartSpec about 4", figures.per_sequence),
    )
    for source, alpha in ((TREES, "0.8"), (TREES_LESS, "0.6")):
        found = results.read(source)
        for load in Runs(found).loads if found else (1.0,):
            rows += [
                results.row(
                    f"α {alpha}, {load:g}/s: {what}",
                    paper if load > 8 else PLOT,
                    source,
                    lambda found, load=load, pick=pick: figures.listed(Runs(found), load, pick),
                )
                for what, paper, pick in claims
            ]
    return Section(
        "Figures 15 and 16: Medusa's trees by request rate",
        tuple(rows),
        "The 7B target of figure 11 has three heads whose tokens are each right with probability α. *top-2* and "
        "*top-3* are full trees. "
        f"{overloaded(results)}*Tokens of a batch* counts prompts too. *Scored tokens per sequence* is the mean of "
        "the last token and the draft, a step. Ours are 250 requests with inputs and outputs of 128 tokens; the "
        "paper's 500 requests have lengths that vary.",
    )


def overloaded(results: Results) -> str:
    """How many requests full trees serve at most; empty where a figure was not simulated."""
    found = [results.read(source) for source in (TREES, TREES_LESS)]
    if None in found:
        return ""
    cells = [
        f"*{name}* " + " and ".join(f"{Runs(each).served(name):.1f}" for each in found if each)
        for name in ("top-2", "top-3")
    ]
    return (
        f"At α 0.8 and 0.6 they serve at most so many requests/s: {', '.join(cells)}. Above, latency is of a growing "
        "queue, which the paper leaves out (section 7.2). "
    )


def heads(results: Results) -> Section:
    """Section 7.2.2 on heads of our own."""
    found = results.read(HEADS)
    rows = [
        results.row(
            f"{name}: acceptance length, nodes, tokens/s",
            "",
            HEADS,
            lambda found, name=name: figures.headed(found["rows"][name]),
        )
        for name in (found["rows"] if found else ("chain of 1",))
    ]
    return Section(
        "Section 7.2.2: full trees and sparse ones, with our target's heads",
        tuple(rows),
        "The paper has full trees and calls for sparser ones. Ours decode greedily, one request at a time. "
        f"{results.sentence(HEADS, repeated)}",
    )


def repeated(found: Found) -> str:
    """How far apart the speeds of equal trees are: those with the same acceptance length to the last digit."""
    speeds: dict[tuple[float, ...], list[float]] = {}
    for row in found["rows"].values():
        speeds.setdefault(tuple(row["acceptance_length"]), []).append(row["tokens_per_s"])
    most = max(max(each) / min(each) for each in speeds.values()) - 1
    return (
        "Speeds ran once, one kind of draft after another. "
        f"Equal trees differ by up to {most:.0%}, so compare acceptance lengths."
    )


def built(widths: tuple[int, ...]) -> str:
    """The number of nodes of the tree that the drafter of heads builds, where the policy allots as many."""
    count = len(level_paths(widths, max_nodes=1000))
    return str(count) if count == nodes(widths) else f"{count}; the policy allots {nodes(widths)}"


def expectations(results: Results) -> Section:
    """Equations 8 and 10, Algorithm 1 and the token counts of 4.3 and 7.2.2."""
    chance = np.random.default_rng(0)
    rows = (
        *(
            results.computed(f"Nodes of a tree of widths {', '.join(map(str, widths))}", said, built(widths), COUNTED)
            for widths, said in (((3, 2, 2), "21"), ((3, 2, 3), "27"))
        ),
        results.computed(
            "Expected tokens of widths 3, 2, 2 at α = 0.7, of at most 4",
            f"{figures.printed_equation_10(0.7, (3, 2, 2)):.2f} (equation 10)",
            f"{figures.drawn_tokens(chance, 0.7, (3, 2, 2)):.2f}",
            f"drawn 200,000 times; the policy computes {tree_tokens(0.7, (3, 2, 2)):.2f}; equation 10 counts too many",
        ),
        results.computed(
            "Expected tokens of a chain of 5 at α = 0.7",
            f"{figures.printed_equation_8(0.7, 5):.2f} (equation 8)",
            f"{figures.drawn_tokens(chance, 0.7, (1,) * 5):.2f}",
            f"drawn 200,000 times; the policy computes {tree_tokens(0.7, (1,) * 5):.2f}",
        ),
        results.computed(
            "α of drafts of 5 whose tokens are each right with 0.7",
            "",
            figures.drawn_rates(chance, 0.7, 5),
            "drawn 200,000 times; the engine counts the second, because no verdict exists after a rejection",
        ),
    )
    return Section("Equations 8 and 10, and counts of sections 4.3 and 7.2.2", rows)


if __name__ == "__main__":
    main("smartspec")
