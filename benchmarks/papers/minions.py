"""Minions: voting, length by slope, pipeline. ``python -m benchmarks.papers.minions [--run]``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks.papers.command import main
from benchmarks.papers.common import Page, Section, unclear
from benchmarks.papers.confidences import by_length
from benchmarks.papers.minions_claims import claims
from benchmarks.papers.minions_lengths import selector
from benchmarks.papers.minions_systems import DEFAULT, LENGTHS, VOTE, servers, specinfer
from benchmarks.papers.not_run import not_run, remaining
from benchmarks.papers.pools import DOMAINS, MIXED, POOL, Pool, of_all_steps
from benchmarks.papers.scenarios import Runs
from benchmarks.papers.sources import Found, Results, Source
from benchmarks.pipelining import DOUBLED, PIPELINED

LONGER = Source("pool_one", "python -m benchmarks.pool --name pool_one")
PIPELINE = Source("pipelining", "python -m benchmarks.pipelining")
DECISIONS = Source("policy_cost", "python -m benchmarks.policy_cost")
SLOPES = {
    batch: Source(f"compare_slope_batch{batch}", f"python -m benchmarks --run compare_slope_batch{batch}")
    for batch in (1, 8)
}
SOURCES = (LENGTHS,)
REFERENCE, CHOSEN = "sequential", "auto, process"
INCREASES = {  # figure 10 by its text, of OPT-13B and of Llama2-70B; each part is on top of the parts above
    "majority": (0.0956, 0.5982),
    "selector": (0.3507, 0.0591),
    "pipeline": (0.3427, 0.5537),
}


def page(results: Results) -> Page:
    """The paper's figures that its text has in numbers."""
    sections = (
        by_length(results),
        servers(results),
        breakdown(results),
        voting(results),
        selector(results),
        specinfer(results),
        overhead(results),
        remaining(results, "minions", *claims(results)),
    )
    return Page("minions", "Minions", sections, results.here)


def breakdown(results: Results) -> Section:
    """Figure 10."""
    rows = (
        results.row(
            "Majority: vote over one drafter",
            "+9.6% (OPT-13B), +59.8% (Llama2-70B)",
            POOL,
            lambda found: Pool(found).speed(VOTE, "generic"),
            "drafters share the target's two cores",
        ),
        results.row(
            "Vote with routing `hedge` over one drafter",
            "",
            POOL,
            lambda found: Pool(found).speed("vote hedge", "generic"),
            "Minions has no routing",
        ),
        results.row(
            "Vote with routing `hedge` over one drafter, with 128 tokens a request",
            "",
            LONGER,
            lambda found: Pool(found).speed("vote hedge", "generic"),
            "another run",
        ),
        results.row(
            "Selector: slope over s = 4, in turn",
            "+35.1%, +5.9%",
            LENGTHS,
            lambda found: gain(Runs(found), "slope in turn", f"{DEFAULT} in turn"),
            "one drafter; the paper votes in both",
        ),
        *(
            results.row(
                f"Selector: slope over s = 4, our models, batch {batch}",
                "+35.1%, +5.9%",
                source,
                slope_over_four,
                "lengths to 8; one drafter on the target's two cores"
                + ("; both slower than no drafts" if batch == 8 else ""),
            )
            for batch, source in SLOPES.items()
        ),
        results.row(
            "Pipeline: slope pipelined over slope in turn",
            "+34.3%, +55.4%",
            LENGTHS,
            lambda found: gain(Runs(found), "slope", "slope in turn"),
            "32 requests in the engine against 16, target batches of 14 to 15; one drafter, assumed times",
        ),
        results.row(
            "Pipelined over sequential, s = 4",
            "",
            LENGTHS,
            lambda found: gain(Runs(found), DEFAULT, f"{DEFAULT} in turn"),
        ),
        results.row(
            "Pipelined over sequential, lengths by goodput",
            "",
            LENGTHS,
            lambda found: gain(Runs(found), "goodput", "goodput in turn"),
        ),
        *(
            results.row(
                f"Pipelined over sequential, our models, batch {batch}",
                "+34.3%, +55.4%",
                PIPELINE,
                lambda found, batch=batch: pipelined(found, batch),
                "drafter and target share two cores",
            )
            for batch in (8, 16)
        ),
    )
    rows += (
        not_run(
            "All parts: over the default system",
            f"{totals(multiplied)} if each increase is over the parts above; {totals(added)} if over the default "
            "(OPT-13B, Llama2-70B; computed)",
            "Vote, slope and pipeline were not run together.",
        ),
    )
    return Section("Figure 10: what each part brings to throughput", rows, conditions(results))


def conditions(results: Results) -> str:
    """How the paper's parts and ours were run."""
    return (
        "The paper's figures are of the finance set at batch 16, each part on top of the parts above. The paper does "
        "not say whether an increase is over the parts above or over the default; read here as the former. As the "
        f"latter, the selector has {over_parts('selector')} over the parts above, the pipeline "
        f"{over_parts('pipeline')}, computed. For Llama2-70B the paper's default length is close to the best (5.3); "
        "figure 2 has 2 at batch 16 on dialogue. The paper votes over three models. Our vote is over four models and "
        f"prompt lookup; all five draft for every request. {results.sentence(POOL, votes)}The paper's drafters share "
        "the target's GPUs by NVIDIA MPS (section 4); our simulated drafters have machines of their own. The paper's "
        "target keeps its batch in the pipeline (section 3.4). So the simulated pipelines have 32 requests in the "
        "engine, the systems in turn 16, and one measured variant has twice the requests. The other pipelines divide "
        "the requests into two batches; *draft-ahead* keeps one. *Overlap* is the busy time of drafter and target "
        "together over the elapsed time; above 1 both work at once. Sequential +0.0% is the reference. *Thread*, "
        "*process* and *a core each* say where the drafter runs; with *auto* the engine chooses the order. "
        f"{results.sentence(PIPELINE, placed)}"
    )


def votes(found: Found) -> str:
    """What the rows of votes are of."""
    return f"The rows of votes are at batch {found['options']['batch']}, on mixed domains, greedy. "


def multiplied(increases: Sequence[float]) -> float:
    """Throughput over the default where each increase is over the parts above."""
    return math.prod(1.0 + increase for increase in increases)


def added(increases: Sequence[float]) -> float:
    """Throughput over the default where each increase is a share of the default's."""
    return 1.0 + sum(increases)


def totals(joined: Callable[[Sequence[float]], float]) -> str:
    """The paper's throughput with all parts, of both models."""
    return ", ".join(f"{joined(increases):.2f}×" for increases in zip(*INCREASES.values(), strict=True))


def over_parts(part: str) -> str:
    """A part's increase over the parts above, of both models, if the paper's increases are shares of the default."""
    place = list(INCREASES).index(part)
    above = [list(model)[:place] for model in zip(*INCREASES.values(), strict=True)]
    return ", ".join(f"{increase / added(parts):+.0%}" for increase, parts in zip(INCREASES[part], above, strict=True))


def voting(results: Results) -> Section:
    """Figure 11."""
    papers = {"finance": (0.87, 0.54), "chatbot": (0.89, 0.49), "dialogue": (0.78, 0.55)}
    said = "; ".join(f"{name} {big}, {small}" for name, (big, small) in papers.items())
    claims: tuple[tuple[str, str, Callable[[Pool, str], str]], ...] = (
        ("throughput of vote over the fastest single drafter", "about 1 or more", over_fastest),
        (
            "acceptance length of vote, and rate; lengths of single drafters",
            f"acceptance rates (OPT-13B, Llama2-70B): {said}",
            vote_and_singles,
        ),
    )
    rows = [
        results.row(
            f"{workload}: {what}",
            paper,
            POOL,
            lambda found, workload=workload, pick=pick: pick(Pool(found), workload),
        )
        for workload in (*DOMAINS, MIXED)
        for what, paper, pick in claims
    ]
    return Section(
        "Figure 11: majority vote against single drafters",
        tuple(rows),
        "Drafts have four tokens, decoding is greedy, at batch 8. Four models and prompt lookup vote. The paper has "
        "batch 16 and acceptance rates, which are accepted over drafted tokens. Ours are acceptance lengths, which "
        "count the target's token too, and rates: (length - 1) / 4. The paper's runs are whole Minions (5.4), with the "
        "lengths of its selector, which it does not print, and pipelined. Rates of other lengths are not comparable. "
        f"Our drafters and target take turns. {results.sentence(POOL, of_all_steps)}",
    )


def overhead(results: Results) -> Section:
    """Figure 14."""
    rows = [
        results.row(
            "Voting and weights, share of the steps' time",
            "at most 2.37% with all parts",
            POOL,
            lambda found: f"{Pool(found).at(VOTE)['own_share']:.1%}",
            results.sentence(POOL, voted),
        )
    ]
    rows += [
        results.row(
            f"Decisions of {policy}, batch 8, measured time over that of a simulated step",
            "at most 2.37% with all parts" if policy == "slope" else "",
            DECISIONS,
            lambda found, policy=policy: share(found, policy),
        )
        for policy in ("slope", "goodput")
    ]
    return Section(
        "Figure 14: overhead",
        tuple(rows),
        "The paper's share is of the whole inference time. Ours are at batch 8. Voting is a share of real steps, which "
        "are short. Decisions are shares of simulated steps, with times similar to the package's models.",
    )


def voted(found: Found) -> str:
    """About how long voting and a step take."""
    pool = Pool(found)
    return f"about {pool.own_ms(VOTE):.1f} ms of {pool.step_ms(VOTE):.1f} ms"


def gain(runs: Runs, ours: str, other: str) -> str:
    """Throughput over that of another variant."""
    return f"{runs.throughput(ours) / runs.throughput(other) - 1:+.1%}"


def slope_over_four(found: Found) -> str:
    """Speed of the slope over four drafted tokens, and the acceptance lengths of both.

    Raises:
        KeyError: the comparison has no such pair.
    """
    lengths = {run["label"]: run["speculation"].get("mean_acceptance_length") for run in found["runs"]}
    for row in found["ratios"]:
        if (row["system"], row["baseline"], row["cost"]) == ("slope", "draft-4", "time_per_token"):
            speed = "{:+.1%} ({:+.1%} to {:+.1%})".format(*(row[key] - 1 for key in ("ratio", "low", "high")))
            drafted = {run["label"]: run["speculation"].get("speculation_length", 0.0) for run in found["runs"]}
            return (
                f"{speed}, acceptance length {lengths['slope']:.2f} against {lengths['draft-4']:.2f}, drafts of "
                f"{drafted['slope']:.1f} tokens against {drafted['draft-4']:.1f}"
            )
    raise KeyError("slope")


def over_fastest(pool: Pool, workload: str) -> str:
    """The vote's throughput over the fastest drafter's, and which drafter is the fastest."""
    fastest = max(pool.drafters, key=lambda name: pool.value("tokens_per_s", name, workload))
    return f"{pool.speed(VOTE, fastest, workload)} of {fastest}"


def vote_and_singles(pool: Pool, workload: str) -> str:
    """The vote's acceptance length and rate, and the lengths of the drafters by themselves."""
    rate = (pool.value("acceptance", VOTE, workload) - 1) / pool.found["options"]["length"]
    singles = ", ".join(f"{name} {pool.value('acceptance', name, workload):.2f}" for name in pool.drafters)
    return f"{pool.interval('acceptance', VOTE, workload)}, rate {rate:.2f}; {singles}"


def share(found: Found, policy: str) -> str:
    """Of one policy at batch 8.

    Raises:
        KeyError: it was not measured.
    """
    for row in found["rows"]:
        if (row["policy"], row["batch"]) == (policy, 8):
            return f"{row['share']:.2%} ({row['plan_us'] + row['observe_us']:.0f} µs)"
    raise KeyError(policy)


def pipelined(found: Found, batch: int) -> str:
    """Throughput of the other orders over taking turns, and how much of the time both parts were at work."""
    ways = found["batches"][str(batch)]
    cells = []
    for name, way in ways.items():
        low, high = way["speed_interval"]
        words = "" if name == REFERENCE else unclear(low, high)
        ends = f"{low - 1:+.1%} to {high - 1:+.1%}"
        cells.append(f"{name} {way['speed'] - 1:+.1%} ({ends}{words}, overlap {way['overlap']:.2f})")
    return "; ".join(cells)


def placed(found: Found) -> str:
    """What the pipeline costs with the requests of the systems in turn, and with twice as many."""
    ways = list(found["batches"].values())
    chosen = " and ".join(f"*{way[CHOSEN]['at_work']['execution_mode']}*" for way in ways)
    halved, doubled = (" and ".join(f"{way[name]['speed']:.2f}" for way in ways) for name in (PIPELINED, DOUBLED))
    return (
        f"With a thread and as many requests the pipeline leaves {halved} of the speed in turn at batch "
        f"{' and '.join(found['batches'])}: it halves the target's batch. With twice the requests it leaves {doubled}, "
        "with both parts on two cores. The losses of the other ways were not split. With *auto* the "
        f"engine chose {chosen}."
    )


if __name__ == "__main__":
    main("minions")
