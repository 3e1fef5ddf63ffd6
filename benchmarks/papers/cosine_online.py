"""CoSine's figure 7: latency of online serving in three modes of arrival, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.papers.common import Row, Section, paragraph
from benchmarks.papers.cosine_nodes import SIZES, WHOLE_DRAFTS
from benchmarks.papers.cosine_parts import PARTS
from benchmarks.papers.scenarios import FOLDER, Runs, inputs, scenario
from benchmarks.papers.sources import Found, Results, Source
from cospec.simulation.scenario import Scenario
from cospec.simulation.workload import due

MODES = {name: scenario(f"cosine-{name}") for name in ("low", "high", "fluctuating")}
PAPERS = {"low": "1.2 to 1.5×", "high": "1.3 to 1.6×", "fluctuating": "1.2 to 1.4×"}
SEQUENCES = Scenario.read(FOLDER / "cosine-high.yaml").max_num_seqs
SPECINFER = "specinfer"  # trees of all drafters in turn with verification, the paper's strongest baseline
BASELINES = {  # variants of the scenarios
    "off": "plain decoding",
    "coupled k=5": "one drafter, k = 5",
    "coupled goodput": "one drafter, goodput",
    SPECINFER: "SpecInfer",
    "pipeinfer": "PipeInfer",
}
COSINE = "cosine fused"  # the paper's combiner
FIXED = "fused outcomes"  # drafts after outcomes in place of the paper's pipeline, trees of one size
AFTER = "goodput fused outcomes"  # the same with sizes by goodput
POOLS = {
    "cosine": "vote",
    "cosine ahead": "vote, drafting ahead",
    COSINE: "fuse",
    FIXED: "fuse, after outcomes",
    AFTER: "fuse of goodput, after outcomes",
    "vote outcomes": "vote, after outcomes",
}
WORDS = BASELINES | POOLS | {"outcomes": "one drafter, after outcomes"}


def online(results: Results) -> Section:
    """Figure 7."""
    rows = [row for mode, source in MODES.items() for row in of_mode(results, mode, source)]
    return Section(
        "Figure 7: latency of online serving",
        tuple(rows),
        paragraph(
            "The target has the times of a 70B model, the drafters have nodes of their own. The systems in turn are "
            "plain decoding, one drafter, and SpecInfer: trees of at most ten tokens of all drafters. PipeInfer is one "
            "drafter of length 5 that drafts ahead. The target has one stage, so one window of a request is in flight, "
            "and no refuted window is in the target; DSD's page has several windows and the early exit. Drafts are "
            "recorded, as in the gain by parts. `vote` and `fuse` are pipelined and route by `hedge` (arXiv "
            "2510.20064). `vote` has lengths and numbers of drafters by goodput. `fuse`, CoSine's combiner, has trees "
            "of at most ten tokens at every load, or of goodput. *After outcomes* is the mode `draft-for-outcomes`, "
            "which no paper here has: drafters branch after each token of the draft that the target verifies, with two "
            "guesses of its next token.",
            SIZES,
            WHOLE_DRAFTS,
            f"Links take 0 ms, and at most {SEQUENCES} requests are in the engine. {inputs()} The paper's online tests "
            "take 2 hours (6.1) or 240 minutes (6.3), ours 600 requests. The paper's latency is time per token from "
            "the start of inference (6.1), ours that of a request from its arrival. In brackets are the target's mean "
            "batch, the drafted tokens of a request and the acceptance length.",
            *(results.sentence(source, partial(arrivals, mode=mode)) for mode, source in MODES.items()),
            f"Pipelining halves batches. {results.sentence(PARTS, pipelined)}",
            slowest(results),
        ),
    )


def arrivals(found: Found, mode: str) -> str:
    """How many requests arrive and how many each system serves."""
    whole, runs = Scenario.model_validate(found["scenario"]), Runs(found)
    given = whole.arrivals
    rates = [run["requests_per_second"] for run in map(runs.at, WORDS)]
    ends = dict.fromkeys(f"{rate:.1f}" for rate in (min(rates), max(rates)))
    served = f"{' to '.join(ends)} are served until the last one ends"
    if given.kind == "open":
        return f"{mode.capitalize()} is {given.rates[0]:g} requests/s; {served}."
    parts = " and ".join(f"{each.seconds:g} s of {each.rate:g}/s" for each in given.segments)
    seconds = sum(each.seconds for each in given.segments)
    mean = sum(each.seconds * each.rate for each in given.segments) / seconds
    last = due(given, whole.requests, runs.loads[0], whole.seed, FOLDER)[-1]
    return (
        f"{mode.capitalize()} is {parts}, {mean:.1f}/s in the mean of a cycle. The {whole.requests} requests arrive in "
        f"{last:.0f} s, {whole.requests / last:.1f}/s; {served}. In its bursts queues grow."
    )


def slowest(results: Results) -> str:
    """Where trees lose most; empty where they are the slowest system nowhere."""
    found = {mode: results.read(source) for mode, source in MODES.items()}
    modes = [mode for mode, each in found.items() if each and max(WORDS, key=Runs(each).latency) == SPECINFER]
    if not modes:
        return ""
    return (
        f"SpecInfer is the slowest system at {' and '.join(modes)} arrivals: its trees make verification expensive "
        "there."
    )


def pipelined(found: Found) -> str:
    """What pipelining changes at the least and at the highest load of the gain by parts."""
    runs = Runs(found)
    ends = runs.loads[0], runs.loads[-1]
    names = "fuse in parallel pipelined", "fuse in parallel"
    low, high = (runs.throughput(names[0], load) / runs.throughput(names[1], load) - 1 for load in ends)
    return (
        f"In the gain by parts pipelining changes the throughput of `fuse` by {low:+.0%} at {ends[0]:g} requests, and "
        f"by {high:+.0%} at {ends[1]:g}."
    )


def of_mode(results: Results, mode: str, source: Source) -> list[Row]:
    """All rows of one mode of arrival."""
    rows = [
        results.row(
            f"{mode}: mean latency in s",
            "CoSine the fastest, SpecInfer the strongest baseline" if mode == "low" else "CoSine the fastest",
            source,
            lambda found: ", ".join(f"{words} {Runs(found).latency(name):.2f}" for name, words in WORDS.items()),
        )
    ]
    for name, words in POOLS.items():
        rows += [
            results.row(
                f"{mode}: latency of SpecInfer over that of {words}",
                PAPERS[mode],
                source,
                lambda found, name=name: over_best(Runs(found), name, (SPECINFER,)),
            ),
            results.row(
                f"{mode}: latency of the best baseline over that of {words}",
                f"{PAPERS[mode]} over SpecInfer",
                source,
                lambda found, name=name: over_best(Runs(found), name, tuple(BASELINES)),
            ),
        ]
    return rows


def over_best(runs: Runs, name: str, others: Sequence[str]) -> str:
    """How many times the latency the best of the others has."""
    best = min(others, key=runs.latency)
    ratio = runs.latency(best) / runs.latency(name)
    return f"{ratio:.2f}× ({WORDS[best]}: {step(runs, best)}; {WORDS[name]}: {step(runs, name)})"


def step(runs: Runs, name: str) -> str:
    """The mean step of a system."""
    run = runs.at(name)
    drafted, length = run["mean_k"], run["mean_acceptance_length"]
    return f"batch {run['mean_batch']:.1f}, {drafted:.1f} drafted, length {length:.2f}"
