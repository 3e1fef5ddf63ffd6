"""A pool on drafter nodes that fail, or whose links lose messages, simulated with recorded drafts."""

from __future__ import annotations

from benchmarks.papers.common import Section
from benchmarks.papers.scenarios import Runs, scenario
from benchmarks.papers.sources import Results

FAILURES = scenario("failing-nodes")
OFF, NODES = "off", "nodes"
CASES = {
    NODES: "Four nodes without a failure",
    "one fails": "One node fails twice, for three seconds each",
    "all fail": "All nodes fail for five seconds",
    "lossy links": "Links lose 1% of the messages, with up to 2 ms of jitter",
    "lossy links with deadline": "The same, and the verifier waits at most 60 ms for a draft",
}


def failures(results: Results) -> Section:
    """What failures of nodes and links cost."""
    return Section(
        "Drafter nodes that fail, and links that lose messages",
        tuple(
            results.row(words, "", FAILURES, lambda found, name=name: compared(Runs(found), name))
            for name, words in CASES.items()
        ),
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
