"""The parts of a pool's gain, simulated with recorded drafts: drafters in sequence, in parallel, and pipelined."""

from __future__ import annotations

from benchmarks.papers.common import Section
from benchmarks.papers.cosine_nodes import WHOLE_DRAFTS
from benchmarks.papers.scenarios import Runs, scenario
from benchmarks.papers.sources import Results

PARTS = scenario("cosine-parts")
ONE, OFF = "one auto", "off"
SYSTEMS = {
    ONE: "One drafter, lengths by goodput",
    "one k=4": "One drafter, length 4",
    "one auto pipelined": "One drafter, lengths by goodput, pipelined",
    "one of four, k=4": "One of four drafters chosen per request, length 4, in sequence",
    "one of four in parallel, k=4": "One of four drafters chosen per request, length 4, in parallel",
    "one of four in processes, k=4": "One of four drafters chosen per request, length 4, in processes",
    **{
        f"{combiner} in {way}": f"{combiner} of four drafters, in {way.replace('l p', 'l and p')}"
        for combiner in ("vote", "union", "fuse")
        for way in ("sequence", "parallel", "parallel pipelined")
    },
    "vote in processes": "vote of four drafters, in processes",
}


def parts(results: Results) -> Section:
    """What each part brings, over no drafts and over one drafter."""
    rows = [
        results.row(words, "", PARTS, lambda found, name=name: compared(Runs(found), name))
        for name, words in SYSTEMS.items()
    ]
    return Section(
        "The gain by parts: drafters in sequence, in parallel, in parallel and pipelined",
        tuple(rows),
        "Throughput with 8, 32 and 128 requests at a time. Drafts are recorded: what the zoo's four drafters proposed "
        "at 3,072 positions of held-out prompts, with the engine's routing `hedge` and its combiners. Times are those "
        "of a 70B target on four GPUs and of drafters with 4 ms per token. `vote` has lengths by goodput, `union` and "
        "`fuse` are at most four tokens deep and eight in all. Acceptance length and drafted tokens are those of 8 "
        "requests. *Off* is no drafts, *auto* one drafter with lengths by goodput. In sequence four drafters cost "
        "more than their agreement brings. In parallel, on nodes, the pool is a little faster than one drafter at low "
        "load. Nodes have links of 0.5 ms, processes none. Unused drafters score known tokens in all three places: in "
        "sequence before a request's first draft, in processes and on nodes while it is written, so the first draft "
        f"has no scores yet. In sequence `fuse` goes token by token. {WHOLE_DRAFTS} The same holds in processes. So "
        "`fuse` in sequence and in parallel differ in their drafts too. Pipelining halves the target's batch. A "
        "target whose time is mostly reading weights loses more by that than the overlap brings. At 128 requests every "
        "variant is slower than no drafts, because a forward's time then grows with its tokens.",
    )


def compared(runs: Runs, name: str) -> str:
    """Throughput of a variant over no drafts and over one drafter, at each load."""
    cells = []
    for load in runs.loads:
        speed = runs.throughput(name, load)
        own, one = speed / runs.throughput(OFF, load), speed / runs.throughput(ONE, load)
        cells.append(f"{load:g}: {own:.2f}× off, {one:.2f}× auto")
    first = runs.at(name, runs.loads[0])
    return f"{'; '.join(cells)}; acceptance length {first['mean_acceptance_length']:.2f}, {first['mean_k']:.1f} drafted"
