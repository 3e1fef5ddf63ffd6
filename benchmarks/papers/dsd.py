"""DSD: speculation over slow links. ``python -m benchmarks.papers.dsd [--run]``."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.common import DOMAINS
from benchmarks.papers import dsd_ahead, dsd_keys, dsd_measured, dsd_speedups, dsd_tau
from benchmarks.papers.answers import ANSWERS
from benchmarks.papers.command import main
from benchmarks.papers.common import How, Page, Section, paragraph, unclear
from benchmarks.papers.comparisons import fastest_relaxed
from benchmarks.papers.dsd_claims import claims, link_time
from benchmarks.papers.dsd_law import BOUNDS, FIRST_ANSWER, LAST_ANSWER, LAW
from benchmarks.papers.dsd_nodes import (
    KEPT,
    NODES,
    RATIOS,
    WINDOW,
    Links,
    assumed,
    communication_reduction,
    corrected_speedup,
    printed_speedup,
    sweep,
)
from benchmarks.papers.not_run import not_run, remaining
from benchmarks.papers.sources import Found, Results, Source
from cospec.ensemble.key_token_calibration import LAMBDA1, LAMBDA2, LAMBDA3

COMMAND = "python -m benchmarks.papers.dsd --run"
SWEEP = Source("simulations/dsd-nodes", COMMAND, How.COMPUTED, sweep)  # it draws what the equation assumes
SOURCES = (
    SWEEP,
    LAW,
    ANSWERS,
    dsd_keys.KEYS,
    dsd_tau.TAU,
    dsd_measured.PROCESSES,
    dsd_measured.RELAY,
    dsd_ahead.TWO,
    dsd_ahead.SLOW,
    dsd_ahead.AHEAD,
)


def page(results: Results) -> Page:
    """What the paper derives, and what its adaptive law does to acceptance."""
    measured = dsd_measured.section(results)
    sections = (
        nodes(results),
        measured,
        dsd_ahead.long_runs(results),
        dsd_measured.relay(results),
        dsd_ahead.ahead(results),
        reduction(results),
        distribution(results),
        dsd_keys.section(results),
        dsd_tau.section(results),
        dsd_speedups.section(results),
        remaining(results, "dsd", *claims(results)),
    )
    return Page("dsd", "DSD", sections, results.here)


def nodes(results: Results) -> Section:
    """Equation 9 over nodes and link latency."""
    rows = []
    for ratio in RATIOS:
        for count in NODES:
            links = Links(count, ratio)
            rows.append(
                results.row(
                    f"Speedup with N = {count}, t₁ = {ratio:g} t₀",
                    "",
                    SWEEP,
                    lambda found, links=links: said_of(found, links),
                )
            )
    return Section(
        "Equation 9: nodes and link latency",
        tuple(rows),
        f"One request at a time, a window of {WINDOW} tokens, {KEPT:.2f} tokens a step, as in the paper's table 1. "
        "The paper prints no figures of equation 9. Equation 9 charges the target's time once per token of the window "
        "and the draft nothing. The corrected one charges one pass over a window and the drafter's steps. *Drawn* is a "
        "simulation of the corrected equation's assumptions, one stage per node, and no evidence for them. "
        f"{assumed()}",
    )


def reduction(results: Results) -> Section:
    """Equation 5, and the node scaling of section 3.2."""
    links = [Links(count, 3.0) for count in (NODES[0], NODES[-1])]
    regime = [communication_reduction(Links(8, ratio), KEPT) for ratio in (3.0, 10.0)]
    rows = [
        results.row(
            f"Time saved with N = {count}, t₁ = 3 t₀",
            "",
            SWEEP,
            lambda found, count=count: time_saved(found, Links(count, 3.0)),
        )
        for count in NODES
    ]
    rows += [
        results.computed(
            f"Time saved by equation 5, N = {count}, t₁ = {ratio:g} t₀",
            "",
            f"{communication_reduction(Links(count, ratio), KEPT):.0%} (equation 5)",
            "the paper calls it most pronounced for 3 ≤ N ≤ 8 and 3 t₀ < t₁ < 10 t₀, without figures; these rows are "
            "at bounds of t₁, and 16 nodes are outside; equation 5 grows with N and t₁, without a maximum",
        )
        for count, ratio in ((4, 3.0), (16, 10.0))
    ]
    rows += [
        results.row(
            f"Length chosen by goodput with N = {count}, t₁ = 10 t₀",
            "8 (table 2; section 3.1, unless noted)",
            SWEEP,
            lambda found, count=count: f"{at(found, Links(count, 10.0))['length']:.1f}",
        )
        for count in NODES
    ]
    rows += [
        results.row(
            "Latency of a token with windows, 16 nodes over 2 nodes, t₁ = 3 t₀",
            "grows less than the nodes",
            SWEEP,
            lambda found: f"{scaled(found):.1f}× for 8× the nodes (drawn)",
            f"the links grow {links[1].nodes - 1} times, from {links[0].nodes - 1} to {links[1].nodes - 1}; without "
            f"windows a token takes {(1 + links[1].crossing) / (1 + links[0].crossing):.1f} times as long",
        ),
        not_run(
            "Section 3.2: which tokens are key tokens",
            "function names and numeric values are; punctuation and filler words are not",
            "The rates of key tokens were stored without the tokens' text; equation 7, below, has their conditions.",
        ),
        not_run(
            "Section 3.2: communication saved over standard speculative decoding, 8 nodes",
            "about 37%",
            "The paper does not say what standard speculative decoding sends. A window per traversal sends as much.",
        ),
        results.computed(
            "Section 3.2, summary: t₁ at which equation 5 saves 37%, N = 8",
            "about 37% communication reduction, without t₁; most pronounced for 3 t₀ < t₁ < 10 t₀",
            f"{link_time(0.37, 8):.2f} t₀",
            f"k = {KEPT:.2f}; at t₁ = 3 t₀ and 10 t₀ equation 5 saves {regime[0]:.0%} and {regime[1]:.0%}; equation 5 "
            "is over one token per traversal, the paper's 37% over standard speculative decoding",
        ),
    ]
    return Section(
        "Equation 5: time saved, and the length that the links call for",
        tuple(rows),
        "Time saved is over decoding one token per traversal. The chosen lengths are of the goodput policy. t₀ is the "
        f"time of the whole pipeline for a token. {assumed()}",
    )


def distribution(results: Results) -> Section:
    """Adaptive verification (section 2.3): speed and quality against the bound of the divergence."""
    rows = []
    for bound in BOUNDS:
        for words, pick in FIGURES.items():
            if bound == 0 and words.startswith(REFERENCE):
                continue
            rows.append(
                results.row(
                    f"Bound {bound:g}: {words}",
                    "",
                    LAW,
                    lambda found, bound=bound, pick=pick: pick(of_bound(found, bound)),
                )
            )
    rows += [
        results.row(
            f"Largest speed over {words}, {loss}",
            PROMISED,
            LAW,
            lambda found, speed=speed, lossless=lossless: best_gain(found, speed, lossless),
        )
        for words, speed in BASELINES.items()
        for loss, lossless in (("no clear loss", True), ("any loss", False))
    ]
    text = paragraph(
        "One request at a time, drafts of 4 at temperature 1, on prompts of three domains.",
        results.sentence(LAW, sizes),
        "The bound of the total variation replaces τ. Key tokens are looked for in the whole vocabulary. Their "
        "conditions come from `cospec calibrate`'s fit on other answers, as far as the fit keeps them.",
        results.sentence(LAW, switched_off),
        "The section on equation 7, below, says how our conditions differ from the paper's.",
        "A rejected token is drawn from the residual of the relaxed distribution, so bound 0 is exact. All systems "
        "take turns at each prompt; intervals are over "
        "texts. The ordinary path is one target with a drafter of 4 tokens. *No clear loss*: the interval of the loss "
        "reaches 0. The paper's 15 to 20% are over nonadaptive speculation and preserve quality. Its table 1 has 0.98× "
        "(1.33 over 1.36×, Llama, τ), 1.04× (2.56 over 2.46×, r = 0.90) and 1.07× (2.62 over 2.46×, r = 0.87, with a "
        "loss of accuracy), all computed. Over Eagle3 its table 2 has 1.11 to 1.21×, computed.",
        results.sentence(LAW, same_fits),
    )
    return Section("Adaptive verification: speed and quality against the bound", tuple(rows), text)


def conditions(row: Found) -> str:
    """Which of equation 7's conditions the fit left: a condition whose threshold no token passes is off."""
    if not row["options"]["max_divergence"]:
        return "none, as nothing is relaxed"
    return " or ".join(left(row["options"])) or "none, so no token is a key token"


def left(options: Found) -> list[str]:
    """The conditions that a fit left."""
    return [words.format(options[name]) for name, (off, words) in CONDITIONS.items() if options[name] != off]


def switched_off(found: Found) -> str:
    """Which conditions the fits left, and at which bounds."""
    fits: dict[str, list[str]] = {}
    counts: dict[int, list[str]] = {}
    for row in found["rows"]:
        if row["max_divergence"]:
            bound = f"{row['max_divergence']:g}"
            fits.setdefault(conditions(row), []).append(bound)
            counts.setdefault(len(left(row["options"])), []).append(bound)
    cells = "; ".join(f"at {at_bounds(bounds)}: {words}" for words, bounds in fits.items())
    rules = [f"At {at_bounds(bounds)} the rows are equation 8 with {LEFT[count]}." for count, bounds in counts.items()]
    return paragraph(
        f"The fit left these conditions of equation 7, {cells}.", *rules, "The paper prints no thresholds."
    )


def at_bounds(bounds: list[str]) -> str:
    """Bounds in words."""
    return f"bounds {', '.join(bounds[:-1])} and {bounds[-1]}" if bounds[1:] else f"bound {bounds[0]}"


def sizes(found: Found) -> str:
    """How many texts were written, and how many reference answers were scored."""
    return (
        f"{found['prompts']} prompts, {found['tokens']} tokens, {found['rounds']} rounds; "
        f"{len(DOMAINS) * (LAST_ANSWER - FIRST_ANSWER)} reference answers."
    )


def same_fits(found: Found) -> str:
    """Which bounds are one configuration, and why."""
    fits: dict[str, list[str]] = {}
    for row in found["rows"]:
        fits.setdefault(str(row["options"]), []).append(f"{row['max_divergence']:g}")
    again = [
        f"Bounds {' and '.join(bounds)} have one fit and differ by chance alone; the first counts."
        for bounds in fits.values()
        if len(bounds) > 1
    ]
    return paragraph(
        f"Where the fitted conditions lose more than {found['tolerance']:g} nats per token, `cospec calibrate` takes a "
        "smaller bound. The limit holds on the answers of the fit; on the judged answers a bound may lose more.",
        *again,
    )


def _interval(row: Found, form: str) -> str:
    middle, low, high = (form.format(row[key]) for key in row)
    return f"{middle} ({low} to {high})"


def _speed(row: Found) -> str:
    return "{ratio:.2f}× ({low:.2f} to {high:.2f}{0})".format(unclear(row["low"], row["high"]), **row)


CONDITIONS = {  # the value that makes no token key, and the condition
    "lambda1": (LAMBDA1[-1], "H_d / H_t > {:g}"),
    "lambda2": (LAMBDA2[-1], "|P_t − P_d| > {:g}"),
    "lambda3": (LAMBDA3[-1], "NormMatch < {:g}"),
}
LEFT = (
    "a bound and no key tokens",
    *(f"a bound and {count} of the three conditions of key tokens" for count in ("one", "two", "all")),
)
REFERENCE = "speed over exact verification"  # bound 0 is this reference
PROMISED = "up to 1.15 to 1.20× (abstract); 0.98 to 1.07× (table 1, computed)"
BASELINES = {
    "exact verification on the same path": "speed",
    "one target with a drafter": "speed_over_one_target",
}
FIGURES: dict[str, Callable[[Found], str]] = {
    "conditions of key tokens": conditions,
    "bound of the fit": lambda row: f"{row['options']['max_divergence']:g}",
    "mean acceptance length": lambda row: f"{row['acceptance_length']:.2f}",
    "acceptance rate": lambda row: f"{row['acceptance']:.2f}",
    "speed over exact verification on the same path": lambda row: _speed(row["speed"]),
    "speed over one target with a drafter": lambda row: _speed(row["speed_over_one_target"]),
    "mean total variation from the target": lambda row: f"{row['divergence']:.4f}",
    "loss of reference answers, nats per token": lambda row: _interval(row["loss"], "{:.4f}"),
    "target's perplexity of the outputs": lambda row: _interval(row["perplexity"], "{:.2f}"),
}


def at(found: Found, links: Links) -> Found:
    """One point of the sweep.

    Raises:
        KeyError: it has no such point.
    """
    for row in found["rows"]:
        if (row["nodes"], row["ratio"]) == (links.nodes, links.ratio):
            return dict(row)
    raise KeyError(links)


def said_of(found: Found, links: Links) -> str:
    """The speedup by equation 9, by the corrected equation, and drawn."""
    printed, corrected = (speedup(links, KEPT, WINDOW) for speedup in (printed_speedup, corrected_speedup))
    row = at(found, links)
    drawn = row["window"] / row["off"]
    return f"{printed:.2f}× (equation 9), {corrected:.2f}× (corrected), {drawn:.2f}× (drawn)"


def scaled(found: Found) -> float:
    """How many times as long a token with windows takes over the most nodes as over the fewest."""
    few, many = (at(found, Links(count, 3.0))["window"] for count in (NODES[0], NODES[-1]))
    return float(few / many)


def time_saved(found: Found, links: Links) -> str:
    """Share of the time per token that the window saves, by equation 5 and drawn."""
    row = at(found, links)
    return f"{communication_reduction(links, KEPT):.0%} (equation 5), {1 - row['off'] / row['window']:.0%} (drawn)"


def of_bound(found: Found, bound: float) -> Found:
    """The figures of one bound.

    Raises:
        KeyError: it was not measured.
    """
    for row in found["rows"]:
        if row.get("max_divergence") == bound:
            return dict(row)
    raise KeyError(bound)


def best_gain(found: Found, speed: str, lossless: bool) -> str:
    """The bound with the largest gain in speed, and what the gain costs."""
    best = fastest_relaxed(found, speed, lossless)
    cost = f"loss {best['loss']['mean']:.4f} nats per token, divergence {best['divergence']:.4f}"
    return f"{_speed(best[speed])} at bound {best['max_divergence']:g}, {cost}"


if __name__ == "__main__":
    main("dsd")
