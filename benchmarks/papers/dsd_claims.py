"""What DSD's text claims in passing, and what its own tables and our stored runs say about it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.common import DOMAINS
from benchmarks.papers.common import Row
from benchmarks.papers.comparisons import EIGHT_TOKENS
from benchmarks.papers.dsd_ahead import AHEAD, LENGTHS, TWO
from benchmarks.papers.dsd_ahead import RATIOS as AHEAD_RATIOS
from benchmarks.papers.dsd_law import LAW
from benchmarks.papers.dsd_measured import NODES, PROCESSES, RATIOS, RELAY, only, point
from benchmarks.papers.dsd_nodes import ALPHA, KEPT, WINDOW
from benchmarks.papers.dsd_pipeline import Nodes, kept
from benchmarks.papers.dsd_speedups import TABLE_2
from benchmarks.papers.not_run import not_run
from benchmarks.papers.sources import Found, Results, Source
from cospec.policies.goodput.draft_shapes import tree_tokens

SAVED = "(N − 1) t₁ (k − 1) / k"
FEWEST, MOST = 4, 8  # nodes of the paper's experiments
Point = tuple[Nodes, Found]


def claims(results: Results) -> tuple[Row, ...]:
    """Rows of the abstract, then of the sections."""
    return (
        *link_times(results),
        best_speeds(),
        results.row(
            "Section 2.1: tokens per target evaluation, γ = 8",
            f"roughly {WINDOW + 1} (γ + 1); {between(lengths(), '{:.2f}')} (average length, table 2)",
            EIGHT_TOKENS,
            lambda found: ", ".join(f"{domain} {accepted(found, domain):.2f}" for domain in DOMAINS),
            "acceptance length at T = 1; γ + 1 is the most that a window can give",
        ),
        speeds_by_equation_9(results),
        *steps(results),
        results.row(
            "Section 3.2: speedup of windows over one token per traversal, by nodes",
            "gains hold up to eight nodes (two to sixteen simulated)",
            PROCESSES,
            lambda found: "; ".join(f"N = {count}: {speedups(found, count)}" for count in NODES),
            "t₁ = 0 to 10 t₀ / N, t₀ of the whole pipeline; k differs by chance",
        ),
        results.row(
            "Sections 1 and 4: synchronization rounds per token",
            f"one per k tokens instead of k: {between([1 / each for each in lengths()], '{:.2f}')} (table 2, computed)",
            PROCESSES,
            traversals,
            f"acceptance is drawn, with k = {KEPT:.2f} in the mean; short runs differ by chance",
        ),
        *(
            results.row(
                f"Section 4: speedup by draft length, N = 4, t₁ = {ratio:g} t₀ / N",
                "scales smoothly with draft length",
                AHEAD,
                partial(by_length, ratio=ratio),
                results.sentence(AHEAD, partial(tokens_by_length, ratio=ratio)),
            )
            for ratio in AHEAD_RATIOS
        ),
    )


def link_times(results: Results) -> list[Row]:
    """The abstract's formula of the time that windows save, compared with the emulated pipelines."""

    def compared(where: str, source: Source, points: Callable[[Found], list[Point]], formula: str = SAVED) -> Row:
        said = results.sentence(
            source,
            lambda found: f"{milliseconds(by_formula, points(found))} (equation {formula}, with our k and t₁)",
        )
        return results.row(
            f"Abstract: time on links that windows save per token, {where}",
            said or formula,
            source,
            lambda found: milliseconds(on_links, points(found)),
            "less the times of these nodes and drafter without links; k is of the same run, t₀ of the whole pipeline; "
            "links are injected, so both sides differ by the time of messages and the noise of times alone",
        )

    def pipelines(found: Found, count: int, ratios: tuple[float, ...]) -> list[Point]:
        return [point(found, count, ratio) for ratio in ratios]

    rows = [
        compared(
            f"N = {count}, t₁ = {', '.join(f'{ratio:g}' for ratio in ratios)} t₀ / N{words}",
            source,
            partial(pipelines, count=count, ratios=ratios),
        )
        for source, ratios, counts, words in (
            (TWO, (3.0, 10.0), (2,), ", 320 tokens"),
            (PROCESSES, RATIOS, NODES, ""),
        )
        for count in counts
    ]
    where = "N = 4, between network namespaces"
    return [*rows, compared(where, RELAY, lambda found: [only(found)], f"{SAVED} with four links for N − 1")]


def milliseconds(of: Callable[[Nodes, Found], float], points: list[Point]) -> str:
    """A time of each point."""
    return ", ".join(f"{1e3 * of(*each):.1f}" for each in points) + " ms"


def on_links(nodes: Nodes, row: Found) -> float:
    """Seconds on links per token with one token per traversal, minus those with windows."""
    plain, windows = row["measured"]["off"], row["measured"]["fixed"]
    local = windows["rounds"] * (nodes.window + windows["depth"] * nodes.draft)
    return float(plain["token"] - nodes.t0 - (windows["token"] - local))


def by_formula(nodes: Nodes, row: Found) -> float:
    """The same by the abstract's formula, with the tokens that a traversal kept."""
    return float(nodes.links * row["t1"] * (1 - row["measured"]["fixed"]["rounds"]))


def best_speeds() -> Row:
    """The speeds that the paper names as its best, and its table 1."""
    return not_run(
        "Abstract, sections 3.2 and 4: best speedups and their accuracy",
        "2.56× on HumanEval with slight accuracy gains, 2.59× on GSM8K at accuracy parity",
        "Accuracy of our models says nothing, see table 1 above. Table 1 loses accuracy at both speeds, r = 0.90: "
        "0.8476 instead of 0.8537, which is one problem of HumanEval's 164, and 0.9166 instead of 0.9227. Of the four "
        "values of r only 0.92 gains accuracy, with 2.54×. Table 1 has larger speedups: 4.80, 3.60, 2.85, 2.62 and, on "
        "HumanEval, 2.59×.",
    )


def lengths() -> list[float]:
    """Average lengths of DSD in table 2."""
    return [length for _, (length, _) in TABLE_2.values()]


def between(figures: list[float], form: str) -> str:
    """The smallest and the largest figure."""
    return f"{form.format(min(figures))} to {form.format(max(figures))}"


def accepted(found: Found, domain: str) -> float:
    """Acceptance length of drafts of eight tokens on a domain.

    Raises:
        KeyError: they were not run there.
    """
    runs = {run["label"]: run["by_category"] for run in found["runs"]}
    return float(runs["draft-8"][domain]["speculation"]["mean_acceptance_length"])


def speeds_by_equation_9(results: Results) -> Row:
    """The time on links at which equation 9 gives table 2, as it gives a slowdown without links."""
    needed = {name: crossing(speed, length) for name, ((speed, _), (length, _)) in TABLE_2.items()}
    low, high = min(needed.values()) / (MOST - 1), max(needed.values()) / (FEWEST - 1)
    unlinked = between([each / (WINDOW + 1) for each in lengths()], "{:.2f}")
    return results.computed(
        "Section 2.4: (N − 1) t₁ at which equation 9 gives table 2",
        ", ".join(f"{name} {speed}×" for name, ((speed, _), _) in TABLE_2.items())
        + f" (table 2); {FEWEST} to {MOST} nodes, links of 100 Gbit/s",
        ", ".join(f"{name} {time:.1f} t₀" for name, time in needed.items()),
        f"γ = 8, k is the average length; t₁ would be {low:.1f} to {high:.1f} t₀; "
        f"at t₁ = 0 equation 9 gives k / (γ + 1), {unlinked}×",
    )


def crossing(speed: float, length: float) -> float:
    """``(N - 1) t₁`` in units of t₀ at which equation 9 gives a speedup."""
    return ((WINDOW + 1) * speed / length - 1) / (1 - speed / length)


def link_time(saved: float, nodes: int) -> float:
    """t₁ in units of t₀ at which equation 5 saves a share of the time, with the paper's k."""
    share = saved * KEPT / (KEPT - 1)
    return share / (1 - share) / (nodes - 1)


def steps(results: Results) -> list[Row]:
    """The time that adaptive verification adds to a step."""
    return [
        results.row(
            f"Section 2.4: time of a step, adaptive verification over {words}",
            "a small constant factor over standard decoding",
            LAW,
            partial(step_times, speed=speed),
            results.sentence(LAW, partial(uncertain, speed=speed)),
        )
        for words, speed in (
            ("exact verification on the same path", "speed"),
            ("one target with a drafter", "speed_over_one_target"),
        )
    ]


def compared_bounds(found: Found, speed: str) -> list[Found]:
    """All bounds, without bound 0 where it is the reference."""
    return [row for row in found["rows"] if row["max_divergence"] or speed != "speed"]


def step_times(found: Found, speed: str) -> str:
    """Acceptance length over speed, both as ratios to the reference, at each bound."""
    exact = found["rows"][0]
    base = exact["acceptance_length"]
    if speed != "speed":
        base /= exact["acceptance_length_ratio"]  # of one target with a drafter
    cells = [
        f"{row['max_divergence']:g}: {row['acceptance_length'] / base / row[speed]['ratio']:.2f}×"
        for row in compared_bounds(found, speed)
    ]
    return f"bound {', '.join(cells)}"


def uncertain(found: Found, speed: str) -> str:
    """How far the speeds may be off, as the time of a step has no interval."""
    speeds = [row[speed] for row in compared_bounds(found, speed)]
    widths = [50 * (each["high"] - each["low"]) / each["ratio"] for each in speeds]
    path = "" if speed == "speed" else "bound 0 needs no statistics, so its excess is the path's; "
    return f"{path}acceptance length over speed, without an interval; speeds alone have ±{between(widths, '{:.0f}')}%"


def speedups(found: Found, count: int) -> str:
    """Least and largest speedup of windows over the links of one pipeline, and the tokens of a traversal.

    Raises:
        KeyError: it was not measured.
    """
    ways = [point(found, count, ratio)[1]["measured"] for ratio in RATIOS]
    speeds = [way["off"]["token"] / way["fixed"]["token"] for way in ways]
    return f"{between(speeds, '{:.2f}')}× (k {between([kept(way['fixed']) for way in ways], '{:.2f}')})"


def traversals(found: Found) -> str:
    """Traversals per token with windows, and without."""
    ways = [row["measured"] for pipeline in found["pipelines"] for row in pipeline["rows"]]
    windows, plain = ([float(way[name]["rounds"]) for way in ways] for name in ("fixed", "off"))
    return f"{between(windows, '{:.2f}')}; without windows {max(plain):.2f}"


def by_length(found: Found, ratio: float) -> str:
    """Speedup of one window in flight over one token per traversal, at each length of the draft."""
    row = at_links(found, ratio)
    plain = row["measured"]["off"]["token"]
    return ", ".join(f"{length}: {plain / row['ahead'][str(length)]['one']['token']:.2f}×" for length in LENGTHS)


def tokens_by_length(found: Found, ratio: float) -> str:
    """Tokens of a traversal as drawn in these runs, and their mean."""
    ways = at_links(found, ratio)["ahead"]
    drawn = ", ".join(f"{kept(ways[str(length)]['one']):.2f}" for length in LENGTHS)
    mean = ", ".join(f"{tree_tokens(ALPHA, (1,) * length):.2f}" for length in LENGTHS)
    return f"one run, one window in flight; k is drawn: {drawn} instead of {mean} in the mean"


def at_links(found: Found, ratio: float) -> Found:
    """The figures of the one pipeline at a delay.

    Raises:
        KeyError: it was not measured.
    """
    for row in found["pipelines"][0]["rows"]:
        if row["ratio"] == ratio:
            return dict(row)
    raise KeyError(ratio)
