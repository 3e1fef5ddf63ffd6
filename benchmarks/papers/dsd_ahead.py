"""Several windows of one request in flight, and runs of several hundred tokens, emulated over processes."""

from __future__ import annotations

import re
from functools import partial
from itertools import product

from benchmarks.papers.common import How, Section, paragraph
from benchmarks.papers.dsd_measured import PROCESSES, speed, times
from benchmarks.papers.dsd_nodes import KEPT
from benchmarks.papers.dsd_pipeline import kept
from benchmarks.papers.sources import Found, Results, Source

AHEAD = Source(
    "dsd_ahead",
    "python -m benchmarks.dsd --nodes 4 --ratios 0 3 --tokens 320 --repeats 1 --ahead 1 2 4 8 --name dsd_ahead",
    How.EMULATED,
)
TWO = Source(
    "dsd_two",
    "python -m benchmarks.dsd --nodes 2 --ratios 3 10 --tokens 320 --repeats 1 --name dsd_two",
    How.EMULATED,
)
SLOW = Source(
    "dsd_regime_long",
    "python -m benchmarks.dsd --nodes 4 8 --ratios 24 32 --tokens 320 --plain-tokens 24 --stage 0.01 --repeats 1 "
    "--alone --name dsd_regime_long",
    How.EMULATED,
)
LONG = {2: (TWO, (3.0, 10.0)), 4: (SLOW, (24.0, 32.0)), 8: (SLOW, (24.0, 32.0))}  # by nodes, with t₁ in t₀ / N
LENGTHS, RATIOS = (1, 2, 4, 8), (0.0, 3.0)
TOKENS = re.compile(r"--tokens (\d+)")


def ahead(results: Results) -> Section:
    """What PipeInfer's windows and its early exit are worth."""
    return Section(
        "Several windows of one request in flight (PipeInfer): emulated over processes",
        tuple(
            results.row(
                f"Windows of {plural(length)}, N = 4, t₁ = {ratio:g} t₀ / N", "", AHEAD,
                partial(windows, length=length, ratio=ratio),
            )
            for ratio, length in product(RATIOS, LENGTHS)
        ),
        paragraph(
            "The mode `draft-ahead` on the pipeline of *Equations 3, 4, 5 and 9: emulated over processes*.",
            "The drafter continues each window at once. "
            "With several windows in flight each continuation is verified at once too, as far as it is valid with a "
            "probability of at least 1 / N. Early exit: stages do not compute windows that earlier windows have "
            "refuted. A command to skip a window takes the time of a link. Times are of one request and one run, whose "
            "tokens a traversal are chance. Where several windows lose, tokens a traversal are fewer by about as much "
            "or more. Without delays early exit is slower with one and two draft tokens, by more than tokens a "
            "traversal make; with delays it is slower with two, by 1%, and with eight, "
            "there by what tokens a traversal make. The rest of each ratio was not measured by parts.",
            results.sentence(AHEAD, without_option),
        ),
    )  # fmt: skip


def long_runs(results: Results) -> Section:
    """Two nodes, and four and eight with the slowest links that the paper names, over more tokens."""
    kinds = {"Time per token": times, "Speedup": speed}
    return Section(
        "Two, four and eight nodes over 320 tokens: emulated over processes",
        tuple(
            results.row(
                f"{what}, N = {count}, t₁ = {ratio:g} t₀ / N", "", source, partial(of, count=count, ratio=ratio)
            )
            for count, (source, ratios) in LONG.items()
            for ratio in ratios
            for what, of in kinds.items()
        ),
        f"As above, with 320 tokens{results.sentence(PROCESSES, shorter)}. So tokens a traversal vary less by chance; "
        f"the paper has {KEPT:.2f}. Four nodes have links of 6 t₀ and 8 t₀, eight nodes of 3 t₀ and 4 t₀, in the "
        "regime 3 t₀ < t₁ < 10 t₀ and at its lower end; there a node takes 10 ms, and plain decoding has 24 tokens, "
        "which take equally long.",
    )


def without_option(found: Found) -> str:
    """What the stored command lacks today; empty where it has the option."""
    if "--ahead" in str(found["command"]):
        return ""
    option = " ".join(map(str, ("--ahead", *LENGTHS)))
    return f"The program has since got the option `{option}`, which these rows need."


def plural(length: int) -> str:
    """A number of draft tokens, in words."""
    return "one draft token" if length == 1 else f"{length} draft tokens"


def windows(found: Found, length: int, ratio: float) -> str:
    """Milliseconds of a token and tokens a traversal with one window, with several, and without early exit.

    Raises:
        KeyError: it was not measured.
    """
    for row in found["pipelines"][0]["rows"]:
        if row["ratio"] == ratio:
            ways = row["ahead"][str(length)]
            one, several, late = (ways[name] for name in ("one", "several", "no early exit"))
            by_chance = one["rounds"] / several["rounds"]
            return (
                f"{cell(one)} with one window, {cell(several)} with several "
                f"({one['token'] / several['token']:.2f}×, by the tokens a traversal alone {by_chance:.2f}×), "
                f"{cell(late)} without early exit"
            )
    raise KeyError(ratio)


def cell(way: Found) -> str:
    """Milliseconds of a token, and tokens a traversal."""
    return f"{way['token'] * 1e3:.1f} ms a token ({kept(way):.2f} tokens a traversal)"


def shorter(found: Found) -> str:
    """How many tokens a request wrote where ``found`` comes from."""
    return f" instead of {TOKENS.findall(str(found['command']))[0]}"
