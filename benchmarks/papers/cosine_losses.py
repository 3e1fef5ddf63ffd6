"""Where the difference to CoSine's figures goes, in parts of the steps; and the same systems on a target in stages."""

from __future__ import annotations

from functools import partial

from benchmarks.papers.common import How, Row, Section, paragraph
from benchmarks.papers.cosine_nodes import AFTER_OUTCOMES, BASELINES, IN_TURN, SOURCES, SPECINFER, WHOLE, Nodes
from benchmarks.papers.sources import Found, Results, Source
from benchmarks.papers.step_parts import StepParts

PIPEINFER, ONE, PLAIN = "PipeInfer", "one drafter", "no drafts"
WINDOWS = ("PipeInfer, windows of 2", "PipeInfer, every window")
IN_STAGES = (WHOLE, SPECINFER, IN_TURN, AFTER_OUTCOMES, ONE, PIPEINFER, *WINDOWS, PLAIN)
GAIN = {SPECINFER: (1.31, 1.62), PIPEINFER: (1.24, 1.46)}  # the paper's, at batch 1 and at batch 16


def in_stages(name: str, given: str) -> Source:
    """Some systems on a target of two stages."""
    only = " ".join(f"'{variant}'" for variant in IN_STAGES)
    command = f"python -m benchmarks.cosine_nodes --stages 2 {given}--name {name} --only {only}"
    return Source(name, command, How.EMULATED)


STAGES = {
    "one request at a time": in_stages("cosine_nodes_stages_one", "--batch 1 --requests 6 "),
    "6 requests": in_stages("cosine_nodes_stages_low", "--requests 6 "),
    "24 requests": in_stages("cosine_nodes_stages", ""),
}
COMPARED = {
    (WHOLE, SPECINFER): "CoSine over SpecInfer",
    (IN_TURN, SPECINFER): "CoSine without pipelining over SpecInfer",
    (AFTER_OUTCOMES, SPECINFER): "CoSine after outcomes over SpecInfer",
    (WHOLE, PIPEINFER): "CoSine over PipeInfer",
    (PIPEINFER, ONE): "PipeInfer over one drafter in turn",
    (WHOLE, PLAIN): "CoSine over no drafts",
    (AFTER_OUTCOMES, PLAIN): "CoSine after outcomes over no drafts",
}
COMPARED_IN_STAGES = ((WHOLE, SPECINFER), (AFTER_OUTCOMES, SPECINFER), (PIPEINFER, ONE))


def losses(results: Results) -> Section:
    """Acceptance, overlap and overhead of each system, and what is missing to the paper's gain."""
    rows: list[Row] = []
    for requests, source in SOURCES.items():
        load = f"{requests} requests"
        rows += [compared(results, pair, load, source) for pair in COMPARED]
        rows += [
            results.row(f"Missing to the paper's gain over {words}, {load}", "", source, partial(missing, other=other))
            for other, words in ((SPECINFER, "SpecInfer"), (PIPEINFER, PIPEINFER))
        ]
    for load, source in STAGES.items():
        rows += [compared(results, pair, f"two stages, {load}", source) for pair in COMPARED_IN_STAGES]
    return Section(
        "Where the difference to the paper goes: acceptance, overlap, overhead",
        tuple(rows),
        paragraph(
            "Throughput is the product of three parts. *Acceptance* is the number of tokens that a step commits for a "
            "request. *Overlap* is the number of requests in a step, divided by the seconds in which the engine waits "
            "for target or drafts. *Overhead* is the share of these seconds in the step. In brackets are the figures "
            "of both systems. Overlap is less where batches are halved, and where the engine waits for drafts. The "
            "parts are of the run with the median throughput. With two stages two steps are in flight, so drafts may "
            "be waited for while the target verifies the other step.",
            "*Missing* is the paper's gain divided by ours. The next factor is the gain if the engine never waited for "
            "drafts, and each step had all requests; the one after is the gain without overhead. The rest comes from "
            "acceptance, or from times of the paper's machines that the injected times do not have.",
        ),
    )


def stages(results: Results) -> Section:
    """Figures 6(a) and 6(c) on a target of two stages, with the early exits of PipeInfer."""
    rows: list[Row] = []
    for load, source in STAGES.items():
        rows += [
            results.row(
                f"{words} over {baseline}, {load}",
                paper,
                source,
                lambda found, name=name, own=own: Nodes(found).both(name, own),
            )
            for own, words in ((WHOLE, "CoSine"), (AFTER_OUTCOMES, "CoSine after outcomes"))
            for name, (baseline, paper) in BASELINES.items()
        ]
        rows += [
            results.row(f"{name}, over one drafter in turn, {load}", "", source, partial(exits, variant=name))
            for name in (PIPEINFER, *WINDOWS)
        ]
    return Section(
        "Figures 6(a) and 6(c) with a target of two stages: drafters on nodes, emulated",
        tuple(rows),
        paragraph(
            "Nodes and times are those of the other emulated sections. The target is two processes, each with half of "
            "the layers and half of the time, and all systems have two steps in flight. With several requests these "
            "are halves of the batch. A request that runs alone has several windows in flight under PipeInfer. A "
            "window ahead is submitted where the windows before are accepted with a probability of at least one half. "
            "*Every window* submits every window ahead. When a window is refuted, all later windows exit early: "
            "a stage that they have not reached does not compute them.",
        ),
    )


def compared(results: Results, pair: tuple[str, str], load: str, source: Source) -> Row:
    """The row of two systems, with the paper's gain where the first is CoSine."""
    variant, other = pair
    said = BASELINES[other][1] if variant == WHOLE else ""
    return results.row(f"{COMPARED[pair]}, {load}", said, source, partial(by_parts, variant=variant, other=other))


def by_parts(found: Found, variant: str, other: str) -> str:
    """Throughput over that of another system, as the product of its parts."""
    own, base = (StepParts.stored(found, name) for name in (variant, other))
    acceptance, overlap, overhead = own.over(base)
    return (
        f"{acceptance * overlap * overhead:.2f}× = {acceptance:.2f}× acceptance ({own.tokens:.2f} against "
        f"{base.tokens:.2f} tokens) · {overlap:.2f}× overlap (batch {own.batch:.1f} against {base.batch:.1f}, "
        f"{1e3 * own.waiting:.0f} against {1e3 * base.waiting:.0f} ms of a step for drafts, target idle "
        f"{idle(found, 'target_idle', variant, other)}, nodes {idle(found, 'nodes_idle', variant, other)}) · "
        f"{overhead:.2f}× overhead ({1e3 * own.rest:.1f} against {1e3 * base.rest:.1f} ms of a step)"
    )


def idle(found: Found, figure: str, variant: str, other: str) -> str:
    """The idle shares of two systems; a system without drafts has no nodes."""
    shares = [found["variants"][name][figure] for name in (variant, other)]
    return " against ".join("none" if share is None else f"{share:.0%}" for share in shares)


def missing(found: Found, other: str) -> str:
    """How far CoSine is from the paper's gain, and what hidden drafts and no overhead would bring."""
    own, base, in_turn = (StepParts.stored(found, name) for name in (WHOLE, other, IN_TURN))
    low, high = (gain * base.throughput / own.throughput for gain in GAIN[other])
    overlap, overhead = own.possible(in_turn)
    left = " to ".join(f"{each / (overlap * overhead):.2f}" for each in (low, high))
    return (
        f"{low:.2f} to {high:.2f}× missing = {overlap:.2f}× without waits for drafts · {overhead:.2f}× "
        f"without overhead · {left}× left"
    )


def exits(found: Found, variant: str) -> str:
    """Throughput over one drafter in turn, refuted windows, and the computations that stages have saved."""
    row = found["variants"][variant]
    windows, skipped = row["exits"]["windows"], row["exits"]["skipped"]
    return (
        f"{Nodes(found).both(ONE, variant)}; {windows:.0f} refuted windows in {row['parts']['steps']:.0f} steps, of "
        f"which stages did not compute {skipped:.0f} halves"
    )
