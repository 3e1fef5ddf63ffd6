"""CoSine's online serving on drafter nodes with injected speeds: latency, price and idle time by mode of arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.cosine_online import MODES as ONLINE_MODES
from benchmarks.cosine_online import TARGET_MS
from benchmarks.papers.common import How, Row, Section, paragraph
from benchmarks.papers.cosine_nodes import (
    AFTER_OUTCOMES,
    BASELINES,
    LEFT_OUT,
    PARTS,
    SPECINFER,
    WHOLE,
    WHOLE_DRAFTS,
    injected,
)
from benchmarks.papers.cosine_online import PAPERS
from benchmarks.papers.sources import Found, Results, Source

ONLINE = Source("cosine_online", "python -m benchmarks.cosine_online", How.EMULATED)
MODES = {"low": PAPERS["low"], "high": PAPERS["high"], "changing": PAPERS["fluctuating"]}
COSINE = {WHOLE: "CoSine", AFTER_OUTCOMES: "CoSine after outcomes"}
ALONE = "after outcomes, one drafter"
SIZED = "goodput"  # CoSine's pipeline with lengths and drafters of goodput
WORDS = {**{name: words for name, (words, _) in BASELINES.items()}, **COSINE, SIZED: "CoSine of goodput", ALONE: ALONE}
OTHERS = {  # variants without a part, and what each is a part of
    **dict.fromkeys(PARTS, WHOLE),
    "goodput without adaptive participation": SIZED,
}
FIGURES: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "mean latency in s": ("CoSine the fastest", lambda row: f"{row['mean_latency']:.2f}"),
    "acceptance length": ("", lambda row: f"{row['acceptance_length']:.2f}"),
    "idle time of the target": ("", lambda row: f"{row['target_idle']:.0%}"),
    "idle time of the nodes": ("", lambda row: "without" if row["nodes_idle"] is None else f"{row['nodes_idle']:.0%}"),
    "price of a million tokens": ("a picture of a table (table 3)", lambda row: f"{row['price_of_million']:.1f}"),
}


def section(results: Results) -> Section:
    """Figure 7 and table 3, emulated."""
    rows: list[Row] = []
    for mode, said in MODES.items():
        rows += [
            results.row(
                f"{mode}: {figure}",
                paper,
                ONLINE,
                lambda found, mode=mode, pick=pick: ", ".join(
                    f"{words} {pick(found['modes'][mode][name])}" for name, words in WORDS.items()
                ),
            )
            for figure, (paper, pick) in FIGURES.items()
        ]
        for name, words in COSINE.items():
            rows += [
                results.row(
                    f"{mode}: latency of SpecInfer over that of {words}",
                    said,
                    ONLINE,
                    lambda found, mode=mode, name=name: over(found, mode, name, SPECINFER),
                ),
                results.row(
                    f"{mode}: latency of the fastest baseline over that of {words}",
                    f"{said} over SpecInfer",
                    ONLINE,
                    lambda found, mode=mode, name=name: over(found, mode, name, fastest(found, mode)),
                ),
            ]
        rows += [
            results.row(
                f"{mode}: {part}, of {WORDS[whole]}",
                "",
                ONLINE,
                lambda f, mode=mode, part=part: without(f, mode, part),
            )
            for part, whole in OTHERS.items()
        ]
    return Section(
        "Figure 7 and table 3: online serving on drafter nodes, emulated",
        tuple(rows),
        paragraph(
            "Target and nodes are those of figures 6(a) and 6(c), emulated, with times of their own: "
            f"{results.sentence(ONLINE, lambda found: injected(found['options']))}.",
            results.sentence(ONLINE, arrivals),
            "Outputs have 48 tokens. Latency is that of a "
            "request from its arrival; the paper's is time per token from the start of inference (6.1). Intervals "
            "resample requests. Prices per hour are assumed: 6 for the target, 0.15 for each node. Idle machines "
            "count, so at low arrivals all systems cost nearly the same.",
            results.sentence(ONLINE, unpipelined),
            LEFT_OUT + ", except with goodput.",
            WHOLE_DRAFTS,
            "*After outcomes* is the mode `draft-for-outcomes` in place of the pipeline, which no paper here has.",
        ),
    )


def arrivals(found: Found) -> str:
    """How often requests arrive, for the times of this target."""
    slower = found["options"]["target_ms"] / TARGET_MS
    low, high = (ONLINE_MODES[name].arrivals.rates[0] / slower for name in ("low", "high"))
    parts = " and ".join(
        f"{each.seconds * slower:g} s of {each.rate / slower:g}/s"
        for each in ONLINE_MODES["changing"].arrivals.segments
    )
    return (
        f"Requests arrive at Poisson times, and all systems serve the same requests: at {low:g}/s (low), {high:g}/s "
        f"(high), and *changing*, which repeats {parts}."
    )


def unpipelined(found: Found) -> str:
    """Why CoSine loses to SpecInfer: how it stands without the pipeline."""
    rows = found["modes"].values()
    ratios = [row["without pipelining"]["mean_latency"] / row[SPECINFER]["mean_latency"] for row in rows]
    cells = ", ".join(f"{each:.2f}" for each in ratios)
    return (
        "CoSine's loss to SpecInfer is mostly the pipeline's: without the pipeline it has "
        f"{cells} times SpecInfer's latency."
    )


def fastest(found: Found, mode: str) -> str:
    """The baseline with the least mean latency."""
    rows = found["modes"][mode]
    return min(BASELINES, key=lambda name: float(rows[name]["mean_latency"]))


def over(found: Found, mode: str, name: str, other: str) -> str:
    """How many times the latency another system has, with the interval."""
    row = found["modes"][mode][name]["latency_over"][other]
    return f"{1 / row['ratio']:.2f}× ({1 / row['high']:.2f} to {1 / row['low']:.2f}; {WORDS[other]})"


def without(found: Found, mode: str, part: str) -> str:
    """How latency, acceptance length and price change without a part."""
    own, whole = (found["modes"][mode][name] for name in (part, OTHERS[part]))
    keys = {"mean_latency": "latency", "acceptance_length": "acceptance length", "price_of_million": "price"}
    return ", ".join(f"{own[key] / whole[key] - 1:+.0%} {words}" for key, words in keys.items())
