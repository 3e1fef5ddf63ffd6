"""Failures, simulated: drafter nodes, links that lose messages, and machines of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.papers.common import Row, Section
from benchmarks.papers.scenarios import Runs, scenario
from benchmarks.papers.sources import Results, Source

FAILURES, OUTAGES = scenario("failing-nodes"), scenario("failing-machines")
OFF, NODES = "off", "nodes"
CASES = {
    NODES: "Four nodes without a failure",
    "one fails": "One node fails twice, for three seconds each",
    "all fail": "All nodes fail for five seconds",
    "lossy links": "Links lose 1% of the messages, with up to 2 ms of jitter",
    "lossy links with deadline": "The same, and the verifier waits at most 60 ms for a draft",
}
WHOLE = "whole"
MACHINES = {
    WHOLE: "Two engines of two stages without a failure",
    "a stage": "A stage of one engine is lost for two seconds",
    "an engine": "One engine is lost for 20 seconds",
    "both engines": "Both engines are lost for five seconds",
}


def rows(
    results: Results, source: Source, cases: Mapping[str, str], cell: Callable[[Runs, str], str]
) -> tuple[Row, ...]:
    """A row for each variant of a scenario."""
    return tuple(
        results.row(words, "", source, lambda found, name=name: cell(Runs(found), name))
        for name, words in cases.items()
    )


def failures(results: Results) -> Section:
    """What failures of nodes and links cost."""
    return Section(
        "Drafter nodes that fail, and links that lose messages",
        rows(results, FAILURES, CASES, compared),
        "The pool `vote` of *The gain by parts* with 16 requests at a time, its drafters on nodes. A node that fails "
        "forgets everything, and reads each sequence again when it is back. A lost message is sent again after 0.2 s "
        "and two delays, as by TCP. A drafter that misses a deadline is left out for a while. With "
        "all nodes gone, steps have no drafts; with lossy links, the target waits. No failure changes a token.",
    )


def compared(runs: Runs, name: str) -> str:
    """Throughput of a variant over no drafts and over nodes without failures, and its acceptance length."""
    speed, run = runs.throughput(name), runs.at(name)
    cells = [f"{speed / runs.throughput(OFF):.2f}× off"]
    if name != NODES:
        cells.append(f"{speed / runs.throughput(NODES):.2f}× nodes without a failure")
    return (
        f"{', '.join(cells)}; acceptance length {run['mean_acceptance_length']:.2f}, {run['mean_k']:.1f} drafted, the "
        f"target idle for {run['target_idle']:.0%}"
    )


def outages(results: Results) -> Section:
    """What failures of the target's machines cost."""
    return Section(
        "Machines of the target that fail",
        rows(results, OUTAGES, MACHINES, delayed),
        "Five requests arrive per second, 200 in all, and all of them end. One drafter, with an assumed acceptance "
        "rate of 0.7, has lengths by goodput. An engine that lost a stage, or was lost itself, computes its KV cache "
        "again. Requests of a lost engine go on in the other engine, or wait. Throughput counts until the last "
        "request ends.",
    )


def delayed(runs: Runs, name: str) -> str:
    """Latency of a variant, also over that without failures, and throughput."""
    latency, run = runs.latency(name), runs.at(name)
    cells = [f"mean latency {latency:.2f} s"]
    if name != WHOLE:
        cells.append(f"{latency / runs.latency(WHOLE):.2f}× without a failure")
    cells += [f"99th percentile {run['latency']['p99']:.1f} s", f"{run['throughput']:.0f} tokens/s"]
    return ", ".join(cells)
