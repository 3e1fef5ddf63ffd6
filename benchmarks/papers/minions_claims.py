"""Minions' claims in passing: times and sizes of drafter and target, idle time, and what a vote verifies."""

from __future__ import annotations

from benchmarks.papers.common import Row
from benchmarks.papers.cosine_nodes import SOURCES as NODES
from benchmarks.papers.cosine_nodes import WHOLE, Nodes, injected
from benchmarks.papers.minions_systems import DEFAULT, LENGTHS, VOTE
from benchmarks.papers.pools import POOL, SIZES, Pool
from benchmarks.papers.scenarios import Runs
from benchmarks.papers.smartspec_figures import PROFILE
from benchmarks.papers.sources import Found, Results, Source

MAGNITUDE = "an order of magnitude"
PAIRS = {"OPT-13B, OPT-125M": (13e9, 125e6), "Llama2-70B, Llama-160M": (70e9, 160e6)}  # parameters by the names
TURNS = f"{DEFAULT} in turn"
ONE = "one drafter"  # a variant of the emulated nodes, in turn with the target
SYSTEMS = {"generic": "one drafter", VOTE: "vote", "union all": "trees"}


def claims(results: Results) -> tuple[Row, ...]:
    """What the paper's text claims in passing, with a counterpart here."""
    return (*scales(results), *idle(results), *bubbles(results), verification(results))


def scales(results: Results) -> tuple[Row, ...]:
    """Section 1: time and parameters of the target over those of the drafter."""
    pairs = ", ".join(f"{target / drafter:.0f}× ({names})" for names, (target, drafter) in PAIRS.items())
    return (
        results.row(
            "Sections 1 and 2.1: time of the target's forward of one token over the drafter's",
            MAGNITUDE,
            PROFILE,
            lambda found: ratios(found, 1),
            "one sequence",
        ),
        results.row(
            "Sections 1 and 2.1: time of the target's four forwards over that of a draft of four tokens",
            MAGNITUDE,
            PROFILE,
            lambda found: ratios(found, 4),
            "one sequence; one native call of the drafter writes all four tokens",
        ),
        results.row(
            "Section 1: parameters of the target over the drafter's",
            f"100 to 1000×; its pairs have {pairs}, computed from the names",
            SIZES,
            sizes,
        ),
    )


def ratios(found: Found, tokens: int) -> str:
    """Time of the target's forwards over that of the drafter's call, at each length of the context with both.

    Raises:
        KeyError: the profile has no such length.
    """
    target, drafter = (
        {(sample["context"], sample["tokens"], sample["passes"]): sample["seconds"] for sample in alone(profile)}
        for profile in found["profiles"]
    )
    cells = [
        f"{tokens * target[context, 1, 1] / seconds:.1f}× after {context} tokens"
        for (context, rows, passes), seconds in sorted(drafter.items())
        if (rows, passes) == (1, tokens) and (context, 1, 1) in target
    ]
    if not cells:
        raise KeyError("samples")
    return ", ".join(cells)


def alone(profile: Found) -> list[Found]:
    """The samples of one sequence."""
    return [sample for sample in profile["samples"] if sample["sequences"] == 1]


def sizes(found: Found) -> str:
    """The package's target and its general drafter."""
    target, drafter = (found["members"][name]["parameters"] for name in ("target", "drafter"))
    return f"{target / drafter:.1f}× ({target / 1e6:.1f} and {drafter / 1e6:.1f} M)"


def idle(results: Results) -> tuple[Row, ...]:
    """Section 2.4: how long drafter and target wait in turn, and the most that their overlap can bring."""
    return (
        results.row(
            "Section 2.4: idle time in turn, s = 4",
            "a large portion for both, without numbers",
            LENGTHS,
            waits,
            "times follow from OPT-13B's size; the drafter's are assumed",
        ),
        *(
            results.row(
                f"Section 2.4: idle time in turn, one drafter on a node, {requests} requests",
                "a large portion for both, without numbers",
                source,
                lambda found: node_waits(found, ONE),
                conditions(results, source),
            )
            for requests, source in NODES.items()
        ),
        results.row(
            "Section 2.4: gain in throughput of the pipeline over turns, s = 4",
            "the pipeline can hide the drafter's time",
            LENGTHS,
            bound,
            "with all of the drafter's time hidden the gain is this share; 32 requests in the engine against 16",
        ),
    )


def waits(found: Found) -> str:
    """Idle shares and the time of a step in turn.

    Raises:
        KeyError: the stored runs have no idle time.
    """
    run = Runs(found).at(TURNS)
    step = 1e3 * run["seconds"] / run["rounds"]
    return f"target {run['target_idle']:.0%}, drafter {run['drafters_idle']:.0%}, of a step of {step:.1f} ms"


def node_waits(found: Found, variant: str) -> str:
    """Idle shares of the target and of the nodes."""
    target, node = (Nodes(found).value(figure, variant) for figure in ("target_idle", "nodes_idle"))
    return f"target {target:.0%}, drafter {node:.0%}"


def bound(found: Found) -> str:
    """The gain in throughput of the pipeline, and the busy time of the drafter over the target's in turn.

    Raises:
        KeyError: the stored runs have no idle time.
    """
    runs = Runs(found)
    turns = runs.at(TURNS)
    most = (1.0 - turns["drafters_idle"]) / (1.0 - turns["target_idle"])
    gain = runs.throughput(DEFAULT) / runs.throughput(TURNS) - 1.0
    return f"{gain:+.1%}; in turn the drafter's time is {most:.1%} of the target's"


def bubbles(results: Results) -> tuple[Row, ...]:
    """Section 3.4: how long the target waits in the pipeline."""
    paper = "none while the pool holds a batch"
    return (
        results.row(
            "Section 3.4: bubbles of the target in the pipeline, s = 4",
            paper,
            LENGTHS,
            gaps,
            "all times are assumed",
        ),
        *(
            results.row(
                f"Section 3.4: bubbles of the target in the pipeline, drafters on 4 nodes, {requests} requests",
                paper,
                source,
                lambda found: f"target idle {Nodes(found).value('target_idle', WHOLE):.0%}",
                f"drafts of the nodes are joined by `fuse`; {conditions(results, source)}",
            )
            for requests, source in NODES.items()
        ),
    )


def conditions(results: Results, source: Source) -> str:
    """Times and drafts of a run on nodes."""
    return f"{results.sentence(source, injected)}, both injected; greedy, at most four tokens"


def gaps(found: Found) -> str:
    """The target's idle share in the pipeline, and how much of it is the engine's time between forwards.

    Raises:
        KeyError: the stored runs have no idle time.
    """
    run = Runs(found).at(DEFAULT)
    between = found["scenario"]["target"]["overhead"] * run["rounds"] / run["seconds"]
    return f"target idle {run['target_idle']:.1%}; the engine's time between forwards is {between:.1%}"


def verification(results: Results) -> Row:
    """Sections 3.2 and 5.3: the tokens and the time of a verification."""
    return results.row(
        "Sections 3.2 and 5.3: verification of a step",
        "the vote verifies one drafter's output, without additional overhead",
        POOL,
        lambda found: ", ".join(f"{words} {verified(Pool(found), name)}" for name, words in SYSTEMS.items()),
        "all domains, batch 8, greedy, s = 4; vote and trees are of five drafters, trees have at most 8 tokens; the "
        "tokens are of a request with its last token, the time is of the batch",
    )


def verified(pool: Pool, system: str) -> str:
    """Tokens that the target computes for a request in a step, and about the time of its forward."""
    tokens = pool.value("verified", system) * pool.value("tokens_per_call", system)
    parts = pool.at(system)["ms_per_token"]
    milliseconds = pool.step_ms(system) * parts["target"] / sum(parts.values())
    return f"{tokens:.1f} tokens in {milliseconds:.1f} ms"
