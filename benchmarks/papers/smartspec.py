"""SmartSpec: speculation length by goodput. ``python -m benchmarks.papers.smartspec [--run]``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.papers import smartspec_figures as figures
from benchmarks.papers.command import main
from benchmarks.papers.common import Page, Row, Section
from benchmarks.papers.curves import Curves
from benchmarks.papers.not_run import remaining
from benchmarks.papers.scenarios import Runs, scenario
from benchmarks.papers.sources import Found, Results, Source
from cospec.policies.goodput.draft_shapes import nodes, tree_tokens

LOAD = Source("load", "python -m benchmarks.load")
SERVED = Source(
    "serve_zoo",
    "cospec bench serve --model zoo --dataset-path examples/data/code.jsonl --dataset-path examples/data/math.jsonl "
    "--dataset-path examples/data/prose.jsonl --output-len 96 --num-prompts 150 --request-rate 2,5,10,15,20 "
    "--result-dir benchmarks/results --result-filename serve_zoo",
)
GRID, RATES, ORACLE, TREES, TREES_LESS = (scenario(f"smartspec-fig{number}") for number in (5, 11, 14, 15, 16))
ZOO = scenario("zoo")
HEADS = Source("heads", "python -m benchmarks.heads")
SOURCES = (GRID, RATES, figures.LOOKUP, ORACLE, TREES, TREES_LESS, ZOO, figures.PROFILE)


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
        remaining("smartspec"),
    )
    return Page("smartspec", "SmartSpec", sections, results.here)


def measured_curves(found: Found) -> Curves:
    """From ``benchmarks.load``."""
    return Curves(
        {row["rate"]: {name: at["mean"] for name, at in row["latency"].items()} for row in found["rows"]}, "auto"
    )


def simulated_curves(found: Found) -> Curves:
    """From a scenario whose adaptive variant is ``goodput``."""
    runs = Runs(found)
    return Curves({load: {name: runs.latency(name, load) for name in runs.variants} for load in runs.loads}, "goodput")


def rates(results: Results) -> Section:
    """Figures 1 and 11."""
    rows = crossings(results, RATES, simulated_curves, "7B, A100") + crossings(
        results, LOAD, measured_curves, "our models"
    )
    return Section(
        "Figures 1 and 11: mean latency by request rate, over no speculation",
        tuple(rows),
        "Rates are each machine's own; what carries over is the order of the curves and where they cross.",
    )


def crossings(results: Results, source: Source, read: Callable[[Found], Curves], who: str) -> list[Row]:
    """What a sweep of rates says."""
    claims: list[tuple[str, str, Callable[[Curves], str]]] = [
        ("Fastest fixed length when idle", "k = 3 or 5, at 4/s", lambda c: c.fastest_fixed(min(c.latency))),
        ("Rate from which k = 5 gains nothing", "above 12/s", lambda c: c.stops("k=5")),
        ("Rate from which k = 3 gains nothing", "above 16/s", lambda c: c.stops("k=3")),
        ("Speedup of the adaptive length, all rates", "1.2 to 3.2× when idle, never slower", Curves.span),
        ("Its latency over the best other's, worst rate", "about 1", Curves.worst_regret),
    ]
    rows = [
        results.row(f"{what} ({who})", paper, source, lambda found, pick=pick: pick(read(found)))
        for what, paper, pick in claims
    ]
    found = results.read(source)
    for load in sorted(read(found).latency) if found else ():
        rows.append(results.row(f"{load:g}/s ({who})", "", source, lambda found, load=load: read(found).row(load)))
    return rows


def steps(results: Results) -> Section:
    """Figure 3."""
    rows = [
        results.computed(
            f"Batch {batch}, k = {length}",
            "latency of a step grows with k, steps fall",
            figures.batch_latency(batch, length),
        )
        for batch in (1, 16, 64)
        for length in (0, 1, 3, 5)
    ]
    text = "Time of one forward of the target, and forwards for 128 tokens at an acceptance of 0.7."
    return Section("Figure 3: latency of a step and number of steps", tuple(rows), text)


def lengths(results: Results) -> Section:
    """Figure 5."""
    rows = [
        results.computed(
            f"Best length at batch {batch}",
            "more than 4 at small batches" if batch <= 4 else "falls as the batch grows, to 0 at large batches",
            str(figures.best_length(batch)),
        )
        for batch in (1, 4, 16, 32, 64, 128, 256)
    ]
    found = results.read(GRID)
    for load in Runs(found).loads if found else (1.0,):
        rows.append(
            results.row(
                f"Tokens per second at batch {load:g}, best fixed length",
                "",
                GRID,
                lambda found, load=load: figures.best_fixed(Runs(found), load),
            )
        )
    return Section(
        "Figure 5: the best proposed length by batch size",
        tuple(rows),
        "The paper does not print the coefficients of its A100 and 7B model; these are the ones of "
        "`examples/scenarios/smartspec-fig5.yaml`, with an acceptance of 0.7 as in the paper. Computed by the goodput "
        "policy's own code, at 128 tokens of context.",
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
    found = results.read(ZOO)
    for load in Runs(found).loads if found else (2.0,):
        rows.append(
            results.row(
                f"Mean latency of the server at {load:g}/s, and the simulator's error",
                "below 10%",
                SERVED,
                lambda served, load=load: figures.fidelity(served, found, load),
                "beside `cospec simulate examples/scenarios/zoo.yaml`",
            )
        )
    return Section("Figures 7 and 13: predicted against measured time", tuple(rows))


def lookup(results: Results) -> Section:
    """Figure 12."""
    source, found = figures.LOOKUP, results.read(figures.LOOKUP)
    loads = sorted(simulated_curves(found).latency) if found else ()
    rows = [
        results.row(
            "Speedup of the adaptive length, all rates",
            "the best at every rate",
            source,
            lambda found: simulated_curves(found).span(),
        ),
        results.row(
            "Its latency over the best other's, worst rate",
            "at most 1",
            source,
            lambda found: simulated_curves(found).worst_regret(),
        ),
    ]
    rows += [
        results.row(f"Speedups at {load:g}/s", "", source, lambda found, load=load: simulated_curves(found).row(load))
        for load in loads
    ]
    return Section(
        "Figure 12: prompt lookup by request rate",
        tuple(rows),
        f"Drafts cost nothing. The paper's 0.3 to 0.4 is read as accepted over proposed tokens: with drafts of "
        f"{figures.LOOKUP_LENGTH} its middle is an acceptance of "
        f"{figures.rate_of(figures.LOOKUP_SHARE, figures.LOOKUP_LENGTH)} for each token.",
    )


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
    return Section("Figure 14: what a better predictor of acceptance could bring", tuple(rows))


def trees(results: Results) -> Section:
    """Figures 15 and 16."""
    rows = []
    for source, alpha in ((TREES, "0.8"), (TREES_LESS, "0.6")):
        found = results.read(source)
        for load in Runs(found).loads if found else (1.0,):
            rows.append(
                results.row(
                    f"α {alpha}, {load:g}/s: latency in s",
                    "top-2 and top-3 rise steeply, SmartSpec stays low" if load > 8 else "",
                    source,
                    lambda found, load=load: figures.listed(Runs(found), load, figures.mean_latency),
                )
            )
            rows.append(
                results.row(
                    f"α {alpha}, {load:g}/s: scored tokens per sequence",
                    "SmartSpec about 4" if load > 8 else "",
                    source,
                    lambda found, load=load: figures.listed(Runs(found), load, figures.per_sequence),
                )
            )
    return Section("Figures 15 and 16: Medusa's trees by request rate", tuple(rows))


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
        "The paper's trees are full, and it calls for sparser ones; greedy, one request at a time.",
    )


def expectations(results: Results) -> Section:
    """Equations 8 and 10, Algorithm 1 and the token counts of 7.2.2."""
    chance = np.random.default_rng(0)
    rows = (
        results.computed("Nodes of a tree of widths 3, 2, 2", "21", str(nodes((3, 2, 2)))),
        results.computed("Nodes of a tree of widths 3, 2, 3", "27", str(nodes((3, 2, 3)))),
        results.computed(
            "Expected tokens of widths 3, 2, 2 at α = 0.7, of at most 4",
            f"{figures.printed_equation_10(0.7, (3, 2, 2)):.2f} (equation 10)",
            f"{tree_tokens(0.7, (3, 2, 2)):.2f}",
            f"drawn 200,000 times: {figures.drawn_tokens(chance, 0.7, (3, 2, 2)):.2f}; equation 10 counts too many",
        ),
        results.computed(
            "Expected tokens of a chain of 5 at α = 0.7",
            f"{tree_tokens(0.7, (1,) * 5):.2f} (equation 8)",
            f"{figures.drawn_tokens(chance, 0.7, (1,) * 5):.2f} (drawn 200,000 times)",
        ),
        results.computed(
            "α of drafts of 5 whose tokens are each right with 0.7",
            "",
            figures.drawn_rates(chance, 0.7, 5),
            "drawn 200,000 times; the engine counts the second, because no verdict exists after a rejection",
        ),
    )
    return Section("Equations 8 and 10, and counts of section 7.2.2", rows)


if __name__ == "__main__":
    main("smartspec")
