"""DSD: speculation over slow links. ``python -m benchmarks.papers.dsd [--run]``."""

from __future__ import annotations

from functools import partial

from benchmarks.papers.command import main
from benchmarks.papers.common import How, Page, Section
from benchmarks.papers.comparisons import COMPARED, in_domain
from benchmarks.papers.dsd_law import TAUS, measure
from benchmarks.papers.dsd_nodes import (
    KEPT,
    NODES,
    RATIOS,
    WINDOW,
    Links,
    communication_reduction,
    corrected_speedup,
    printed_speedup,
    sweep,
)
from benchmarks.papers.sources import Found, Results, Source

COMMAND = "python -m benchmarks.papers.dsd --run"
SWEEP = Source("simulations/dsd-nodes", COMMAND, How.SIMULATED, sweep)
LAW = Source("dsd_law", COMMAND, How.MEASURED, measure)
SOURCES = (SWEEP, LAW)
MODEST = 0.3  # the end of the range that the paper uses by default


def page(results: Results) -> Page:
    """What the paper derives, and what its adaptive law does to acceptance."""
    sections = (nodes(results), reduction(results), distribution(results), speedups(results))
    return Page("dsd", "DSD", sections, results.here)


def nodes(results: Results) -> Section:
    """Equations 3, 4 and 9 over nodes and link latency."""
    rows = []
    for ratio in RATIOS:
        for count in NODES:
            links = Links(count, ratio)
            rows.append(
                results.row(
                    f"Speedup with N = {count}, t₁ = {ratio:g} t₀",
                    f"{printed_speedup(links, KEPT, WINDOW):.2f}× (equation 9)",
                    SWEEP,
                    lambda found, links=links: f"{at(found, links)['window'] / at(found, links)['off']:.2f}×",
                    f"corrected equation: {corrected_speedup(links, KEPT, WINDOW):.2f}×",
                )
            )
    return Section(
        "Equations 3, 4 and 9: nodes and link latency",
        tuple(rows),
        f"One request at a time, a window of {WINDOW} tokens, {KEPT:.2f} tokens a step, as in the paper's table 1. "
        "Equation 9 charges the target's time once per token of the window and the draft nothing; the corrected one "
        "charges what one pass over a window takes, and the drafter's steps. The simulated pipeline has one stage per "
        "node.",
    )


def reduction(results: Results) -> Section:
    """Equation 5, and the node scaling of section 3.2."""
    rows = [
        results.row(
            f"Time saved with N = {count}, t₁ = 3 t₀",
            f"{communication_reduction(Links(count, 3.0), KEPT):.0%} (equation 5)",
            SWEEP,
            lambda found, count=count: saved(at(found, Links(count, 3.0))),
            "the paper's text says about 37% at 8 nodes" if count == 8 else "",
        )
        for count in NODES
    ]
    rows += [
        results.row(
            f"Length chosen by goodput with N = {count}, t₁ = 10 t₀",
            "8 in all settings",
            SWEEP,
            lambda found, count=count: f"{at(found, Links(count, 10.0))['length']:.1f}",
        )
        for count in NODES
    ]
    return Section("Equation 5: time saved, and the length that the links call for", tuple(rows))


def distribution(results: Results) -> Section:
    """The relaxation coefficient (section 3.2) as a law."""
    figures: list[tuple[str, str, str]] = [
        ("mean acceptance length", "acceptance_length", "{:.2f}"),
        ("acceptance rate", "acceptance", "{:.2f}"),
        ("mean total variation from the target", "divergence", "{:.4f}"),
    ]
    rows = [
        results.row(
            f"τ = {tau:g}: {words}",
            "",
            LAW,
            lambda found, tau=tau, key=key, form=form: form.format(of_tau(found, tau)[key]),
        )
        for tau in TAUS
        for words, key, form in figures
    ]
    rows.append(results.row(f"Gain of τ = {MODEST:g} in acceptance length", "15 to 20% of speed at most", LAW, gain))
    return Section(
        "The relaxation coefficient τ",
        tuple(rows),
        "Windows of 4 at temperature 1, on prompts of three domains. As corrected: key tokens are looked for in the "
        "whole vocabulary, and a rejected token is drawn anew from the residual of the target distribution, so that "
        "τ = 0 is exact.",
    )


def speedups(results: Results) -> Section:
    """Table 2; on one machine, hence without links."""
    papers = {
        "code": ("HumanEval, γ = 8", "2.56× over 4 to 8 nodes"),
        "math": ("GSM8K, γ = 8", "2.52× over 4 to 8 nodes"),
        "prose": ("CNN/DailyMail, γ = 8", "1.91× over 4 to 8 nodes"),
    }
    rows = [
        results.row(f"Speedup, {ours} ({theirs} in the paper)", paper, COMPARED[1], partial(in_domain, domain=ours))
        for ours, (theirs, paper) in papers.items()
    ]
    text = "Ours on one machine, greedy, one request at a time, drafts of 4."
    return Section("Table 2: speedup over plain decoding", tuple(rows), text)


def at(found: Found, links: Links) -> Found:
    """One point of the sweep.

    Raises:
        KeyError: it has no such point.
    """
    for row in found["rows"]:
        if (row["nodes"], row["ratio"]) == (links.nodes, links.ratio):
            return dict(row)
    raise KeyError(links)


def saved(row: Found) -> str:
    """Share of the time per token that the window saves."""
    return f"{1 - row['off'] / row['window']:.0%}"


def of_tau(found: Found, tau: float) -> Found:
    """The figures of one coefficient.

    Raises:
        KeyError: it was not measured.
    """
    for row in found["rows"]:
        if row["tau"] == tau:
            return dict(row)
    raise KeyError(tau)


def gain(found: Found) -> str:
    """What a modest coefficient adds to exact verification."""
    modest, exact = (of_tau(found, tau)["acceptance_length"] for tau in (MODEST, 0))
    return f"{modest / exact - 1:+.1%}"


if __name__ == "__main__":
    main("dsd")
