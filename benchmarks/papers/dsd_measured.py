"""DSD's pipeline as processes whose nodes and links take injected times, compared with the equations."""

from __future__ import annotations

from functools import partial
from itertools import product

from benchmarks.papers.common import How, Row, Section, paragraph
from benchmarks.papers.dsd_pipeline import Nodes, kept
from benchmarks.papers.sources import Found, Results, Source

NODES, RATIOS = (2, 4, 8), (0.0, 1.0, 3.0, 10.0)
PROCESSES = Source("dsd", "python -m benchmarks.dsd", How.EMULATED, fresh=lambda found: "stage" in found)
REGIME = Source(
    "dsd_regime",
    "python -m benchmarks.dsd --nodes 4 8 --ratios 24 32 --tokens 24 --repeats 1 --name dsd_regime",
    How.EMULATED,
)
SLOWEST = tuple(product((4, 8), (24.0, 32.0)))  # nodes, and t₁ in t₀ / N
RELAY = Source(
    "dsd_namespaces",
    "python -m benchmarks.netns --nodes 4 --delay 0.015 --jitter 0.01 -- "
    "python -m benchmarks.dsd --namespaces 4 --delay 0.02 --tokens 96",
    How.EMULATED,
)
LOSSY = Source(
    "dsd_lossy",
    "python -m benchmarks.netns --nodes 4 --delay 0.02 --jitter 0.005 --loss 0.01 --bandwidth 1250000 -- "
    "python -m benchmarks.dsd --namespaces 4 --delay 0.0225 --tokens 96 --name dsd_lossy",
    How.EMULATED,
)
RELAYS = {"": RELAY, ", 1% of packets lost, 10 Mbit/s": LOSSY}
LOADED = *((count, 10, PROCESSES) for count in NODES), *((count, 32, REGIME) for count in (4, 8))  # slowest links
TOGETHER = {
    "over one token per traversal": "one token, windows in flight",
    "over one window in flight": "windows, one in flight",
}


def section(results: Results) -> Section:
    """Time per token, speedup, and the gain of windows in flight."""
    rows: list[Row] = []
    for count, ratio in product(NODES, RATIOS):
        of = f"N = {count}, t₁ = {ratio:g} t₀ / N"
        rows.append(results.row(f"Time per token, {of}", "", PROCESSES, partial(times, count=count, ratio=ratio)))
        rows.append(results.row(f"Speedup, {of}", "", PROCESSES, partial(speed, count=count, ratio=ratio)))
    for count, ratio in SLOWEST:
        of = f"N = {count}, t₁ = {ratio / count:g} t₀ = {ratio:g} t₀ / N"
        rows.append(results.row(f"Time per token, {of}", "", REGIME, partial(times, count=count, ratio=ratio)))
        said = "most pronounced for 3 ≤ N ≤ 8 and 3 t₀ < t₁ < 10 t₀" + ("; a boundary" if ratio == 3 * count else "")
        rows.append(results.row(f"Speedup, {of}", said, REGIME, partial(speed, count=count, ratio=ratio)))
    for (count, ratio, source), (words, name) in product(LOADED, TOGETHER.items()):
        what = f"Throughput of {count} requests over {count} nodes, t₁ = {ratio} t₀ / N, windows in flight, {words}"
        rows.append(results.row(what, "", source, partial(gain, count=count, name=name)))
    return Section(
        "Equations 3, 4, 5 and 9: emulated over processes",
        tuple(rows),
        paragraph(
            "Each node is a process. Nodes, links and drafter sleep for injected times, so that two cores stand for "
            "many machines. The overhead of processes and messages is real; compute, links and acceptance are not.",
            results.sentence(PROCESSES, injected),
            "The equations take the tokens a traversal of the same run, and times of the same pipeline without links. "
            "So an error says what processes, messages and links add, and nothing of acceptance. The time of a window "
            "is a mean over two runs, of t₁ ≥ 3 t₀ over one, so it may be some percent too long.",
            results.sentence(PROCESSES, lambda found: drawn(found, results.read(REGIME) or {"pipelines": []})),
            "Tokens a traversal are all tokens over all traversals. A node takes as long for a window as for one "
            "token, which equations 4 and 9 deny. The corrected equation 4 charges one pass over a window and the "
            "draft. Equation 5 counts the time of links alone; a window also saves the "
            "node's time. One window in flight carries all requests, and a node takes as long for "
            "all as for one. So windows in flight have little to gain here, and lose where links are slow. Their rows "
            "have the tokens of a request and traversal, which are chance, and the ratio by these alone. What is left "
            "of a ratio was not measured by parts.",
            "t₀ is the time of the whole pipeline, so t₀ / N is that of one node. Without links equation 3 is t₀ "
            "itself. The paper's table 2 has links of 100 Gbit/s and prints no delays, so no row is of its kind.",
        ),
    )


def relay(results: Results) -> Section:
    """The same over links between network namespaces."""
    kinds = {"Time per token": times_of, "Speedup": speed_of}
    return Section(
        "Equations 3, 4, 5 and 9: emulated over links between network namespaces",
        tuple(
            results.row(f"{what}, N = 4{link}", "", source, lambda found, of=of: of(*only(found)))
            for link, source in RELAYS.items()
            for what, of in kinds.items()
        ),
        "Each node is a process in a network namespace. A relay of packets gives each link 15 ms and up to 10 ms of "
        "jitter; the result returns over such a link too. So a traversal crosses four links, of 20 ms in the mean. "
        "The equations are taken with these four links instead of N − 1. "
        "TCP runs over these links, and nodes take injected times as above. The first command below runs after "
        "`python -m benchmarks.netns --nodes 4 --delay 0.015 --jitter 0.01 --`. Lossy links have 20 ms, up to 5 ms of "
        "jitter and one lost packet in a hundred, which TCP sends again; the equations know no losses.",
    )


def only(found: Found) -> tuple[Nodes, Found]:
    """The one pipeline at its one delay."""
    (pipeline,) = found["pipelines"]
    return Nodes.stored(pipeline["nodes"]), pipeline["rows"][0]


def injected(found: Found) -> str:
    """What a node and the drafter sleep."""
    nodes = found["pipelines"][0]["nodes"]
    return f"A node takes {1e3 * found['stage']:.0f} ms, a draft token {nodes['draft'] / nodes['t0']:.2f} t₀."


def drawn(found: Found, slow: Found) -> str:
    """The acceptance that was injected, and how far apart the tokens of a traversal are in these short runs."""
    pipelines = [*found["pipelines"], *slow["pipelines"]]
    tokens = [kept(row["measured"]["fixed"]) for pipeline in pipelines for row in pipeline["rows"]]
    return (
        f"Tokens are right with probability {found['acceptance']:g}. Runs are short and leave {min(tokens):.1f} to "
        f"{max(tokens):.1f} tokens a traversal."
    )


def times(found: Found, count: int, ratio: float) -> str:
    """``times_of`` a pipeline at a delay."""
    return times_of(*point(found, count, ratio))


def predicted(nodes: Nodes, row: Found) -> dict[str, float]:
    """The equations at a delay, with the tokens that a traversal kept there."""
    return nodes.equations(row["t1"], kept(row["measured"]["fixed"]))


def times_of(nodes: Nodes, row: Found) -> str:
    """Milliseconds of one token per traversal and of windows, with the errors of equation 3 and the corrected 4."""
    plain, window = (row["measured"][name]["token"] for name in ("off", "fixed"))
    said = predicted(nodes, row)
    first, second = said["plain_eq3"], said["window_corrected"]
    return (
        f"{plain * 1e3:.1f} ms plain ({off_by(plain / first)} equation 3), "
        f"{window * 1e3:.1f} ms with windows (equation 4: {said['window_eq4'] * 1e3:.1f} ms; "
        f"{off_by(window / second)} the corrected one)"
    )


def off_by(ratio: float) -> str:
    """A ratio to a prediction, in words."""
    return f"{abs(ratio - 1):.0%} {'above' if ratio >= 1 else 'below'}"


def speed(found: Found, count: int, ratio: float) -> str:
    """``speed_of`` a pipeline at a delay."""
    return speed_of(*point(found, count, ratio))


def speed_of(nodes: Nodes, row: Found) -> str:
    """Speedup and saved share of the window, compared with equations 9 and 5, and speedup of lengths by goodput."""
    plain, window, free = (row["measured"][name]["token"] for name in ("off", "fixed", "goodput"))
    said = predicted(nodes, row)
    return (
        f"{plain / window:.2f}× ({said['speed_eq9']:.2f}× by equation 9, {said['speed_corrected']:.2f}× corrected, "
        f"{kept(row['measured']['fixed']):.2f} tokens a traversal); {1 - window / plain:.0%} of the time saved "
        f"({said['saved_eq5']:.0%} by equation 5, {1 - 1 / said['speed_corrected']:.0%} corrected); "
        f"{plain / free:.2f}× with lengths by goodput ({kept(row['measured']['goodput']):.2f} tokens of "
        f"drafts of {row['measured']['goodput']['depth']:.1f})"
    )


def gain(found: Found, count: int, name: str) -> str:
    """Throughput with windows in flight over another way at the slowest links, and the tokens of a traversal of both.

    With one window in flight a traversal carries all requests.
    """
    for pipeline in found["pipelines"]:
        if pipeline["nodes"]["count"] == count:
            together = pipeline["rows"][-1]["together"]
            flying, other = together["windows in flight"], together[name]
            tokens = f"{kept(flying):.2f} tokens of a request and traversal"
            if other["depth"]:
                alone = kept(other) / count
                tokens += f", {alone:.2f} with one in flight, by these alone {kept(flying) / alone:.2f}×"
            return f"{other['token'] / flying['token']:.2f}× ({tokens})"
    raise KeyError(count)


def point(found: Found, count: int, ratio: float) -> tuple[Nodes, Found]:
    """One pipeline at one delay.

    Raises:
        KeyError: it was not measured.
    """
    for pipeline in found["pipelines"]:
        for row in pipeline["rows"]:
            if (pipeline["nodes"]["count"], row["ratio"]) == (count, ratio):
                return Nodes.stored(pipeline["nodes"]), row
    raise KeyError(count, ratio)
