"""CoSine: what the paper's text claims in passing, with a counterpart here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.papers import large_targets as large
from benchmarks.papers.common import Row
from benchmarks.papers.minions import LONGER
from benchmarks.papers.pools import POOL, SIZES, Pool
from benchmarks.papers.smartspec_figures import PROFILE
from benchmarks.papers.sources import Found, Results, Source

NODE_OVERHEAD = Source("node_overhead", "python -m benchmarks.node_overhead")
LINKS = Source("links_here", "python -m benchmarks.links --here")
SHORTEST, LONGEST = 5, 12  # tokens of a verification that is like the paper's
COUNTS = (1, 2, 4)  # drafters of the measured pools
WHOLE_AT_8, WITHOUT_AT_8 = 1.72, {"routing": 1.18, "fusion": 1.13}  # throughput with 8 devices, section 6.4
ONE = "vote hedge, one"  # a pool that asks one drafter for each request
PAIRS = {  # target, drafter, and what each runs on (section 6.1)
    "LLaMA": (large.LLAMA_70B, large.LLAMA_68M, large.RTX_2080_TI),
    "Qwen": (large.QWEN_32B, large.QWEN_HALF_B, large.RTX_3090),
}


def claims(results: Results) -> tuple[Row, ...]:
    """Return the rows, in the order of the paper's sections."""
    return (costs(results), *coordination(results), *implementation(results), sizes(results), *ablation(results))


def costs(results: Results) -> Row:
    """Return what a drafter's token costs; the paper's pairs have computed costs."""
    operations = " and ".join(f"{of_parameters(pair):,.0f}× ({pair})" for pair in PAIRS)
    times = " and ".join(f"{of_time(pair):.1f}× ({pair})" for pair in PAIRS)
    return results.row(
        "Section 1: time of a forward of one token, target over drafter",
        f"roughly 1,000× lower computation for drafters; by operations {operations} (computed from the models' "
        "published sizes)",
        PROFILE,
        over_drafter,
        "a forward of one token mostly reads weights, so its time differs less than its operations; for the paper's "
        f"pairs the rule of figure 6(b) gives {times}",
    )


def coordination(results: Results) -> tuple[Row, ...]:
    """Return what a round and a message take between processes."""
    said = "microsecond-level coordination (4.2); links below 1 ms (6.1)"
    rows = [
        results.row(
            f"Section 4.2: time of a round over a {executor}, without the drafter's own time",
            said,
            NODE_OVERHEAD,
            lambda found, executor=executor: rounds(found, executor),
            "both ends on one machine",
        )
        for executor in ("node", "process")
    ]
    return (
        results.row(
            "Section 3.2: time of a step with 1, 2 and 4 drafters",
            "coordination overhead grows superlinearly with the nodes, without numbers",
            POOL,
            lambda found: "; ".join(f"{count}: {Pool(found).step(f'{count}: fuse hedge')}" for count in COUNTS),
            "drafters on the target's two cores, so the step grows by their drafts, too",
        ),
        *rows,
        results.row(
            "Section 4.2: time of a message over TCP, one way",
            said,
            LINKS,
            lambda found: f"{1e3 * found['seconds']['message']['1']:.2f} ms with one row of {found['hidden']} floats",
            "both ends on one machine; the message has hidden states, the paper's has tokens",
        ),
    )


def implementation(results: Results) -> tuple[Row, ...]:
    """Return the times of section 5."""
    rows = [
        results.row(
            f"Section 5: time of a routing decision{words}",
            "0.1 ms",
            source,
            decision,
            "one drafter per request; the time includes weighting and join, so it is an upper bound",
        )
        for words, source in (("", POOL), (", longer outputs", LONGER))
    ]
    return (
        *rows,
        results.row(
            "Section 5: verification over sequential decoding",
            "1.7× faster",
            PROFILE,
            verification,
            "forwards of our target for one sequence; the paper does not name the number of tokens",
        ),
    )


def sizes(results: Results) -> Row:
    """Return the sizes of the models in section 6.1."""
    named = " and ".join(f"{of_parameters(pair):,.0f} ({pair})" for pair in PAIRS)
    return results.row(
        "Section 6.1: parameters of the target over those of a drafter",
        f"on the order of millions (LLaMA), of hundreds (Qwen); {named} (computed from the models' published sizes)",
        SIZES,
        parameters,
        "the paper's words for the LLaMA pair disagree with its models' sizes",
    )


def ablation(results: Results) -> tuple[Row, ...]:
    """Return what section 6.4 says about more devices."""
    at_8 = {
        part: f"{without} against {WHOLE_AT_8}, {1 - without / WHOLE_AT_8:.0%} less (computed)"
        for part, without in WITHOUT_AT_8.items()
    }
    said = {
        "routing": f"29 to 33% less, and a wider gap with more devices; at 8 devices {at_8['routing']}",
        "fusion": f"17 to 34% less; at 8 devices {at_8['fusion']}",
    }
    notes = {
        "routing": "the paper's widest gap, 33%, is not at 8 devices; its variant leaves out routing and fusion "
        "together, yet at 8 devices loses less than the variant without fusion alone",
        "fusion": "here, no fusion unites the drafts of all drafters in a tree",
    }
    rows = [
        results.row(
            f"Section 6.4: change of throughput without {part}, by drafters",
            said[part],
            POOL,
            lambda found, part=part: changes(Pool(found), f"no {part}"),
            f"{notes[part]}; ratios of medians, without intervals",
        )
        for part in said
    ]
    grown = {
        "no fusion": ("without fusion", "diminishing returns of added nodes"),
        "fuse hedge": ("with fusion", "fusion prevents quality saturation with more drafters"),
    }
    rows += [
        results.row(
            f"Section 6.4: acceptance length and tokens per second of 1, 2 and 4 drafters, {words}",
            paper,
            POOL,
            lambda found, system=system: lengths(Pool(found), system),
            results.sentence(POOL, lambda found: compared(Pool(found))) if system == "no fusion" else "",
        )
        for system, (words, paper) in grown.items()
    ]
    return tuple(rows)


def of_parameters(pair: str) -> float:
    """Return the parameters of the paper's target over those of its drafter."""
    target, drafter, _ = PAIRS[pair]
    return target.shared / drafter.shared


def of_time(pair: str) -> float:
    """Return the time of a token of the paper's target over that of its drafter, each on its own GPUs."""
    target, drafter, gpu = PAIRS[pair]
    return target.seconds(large.a100(4), 1.0) / drafter.seconds(gpu, 1.0)


def parameters(found: Found) -> str:
    """Return the ratio of the zoo's models, and their sizes."""
    target, drafter = (found["members"][name]["parameters"] for name in ("target", "drafter"))
    return f"{target / drafter:.1f} ({target / 1e6:.1f} over {drafter / 1e6:.1f} million)"


def over_drafter(found: Found) -> str:
    """Return the ratio at each length of the context that both profiles have.

    Raises:
        KeyError: there is no such length.
    """
    target, drafter = (one_token(profile["samples"]) for profile in found["profiles"][:2])
    cells = [f"{target[at] / drafter[at]:.1f}× after {at} tokens" for at in sorted(target.keys() & drafter.keys())]
    if not cells:
        raise KeyError("samples")
    return ", ".join(cells)


def one_token(samples: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the seconds of one forward of one token for one sequence, by the length of the context."""
    wanted = (1, 1, 1.0)
    return {
        sample["context"]: float(sample["seconds"])
        for sample in samples
        if (sample["sequences"], sample["tokens"], sample["passes"]) == wanted
    }


def rounds(found: Found, executor: str) -> str:
    """Return the overhead of a round with a draft model, by the number of requests.

    Raises:
        KeyError: the executor was not measured.
    """
    cells = [
        f"{1e3 * row['overhead']:.2f} ms with {row['batch']} request{'s' if row['batch'] > 1 else ''}"
        for row in found["rows"]
        if (row["drafter"], row["executor"]) == ("draft_model", executor)
    ]
    if not cells:
        raise KeyError(executor)
    return ", ".join(cells)


def decision(found: Found) -> str:
    """Return the milliseconds that a pool takes for itself in a step.

    Raises:
        KeyError: they were not measured.
    """
    pool, batch, tokens = Pool(found), found["options"]["batch"], found["options"]["tokens"]
    if pool.at(ONE)["own_share"] is None:
        raise KeyError("own_share")
    own, step = pool.own_ms(ONE), pool.step_ms(ONE)
    return f"at most {own:.3f} ms of a step of {step:.1f} ms, {batch} requests of {tokens} tokens"


def verification(found: Found) -> str:
    """Return the time of as many forwards of one token over that of one forward, at each context with both.

    Raises:
        KeyError: there is no such context.
    """
    alone = [sample for sample in found["profiles"][0]["samples"] if sample["sequences"] == 1]
    seconds = {(sample["context"], sample["tokens"]): sample["seconds"] for sample in alone}
    cells = [
        f"{tokens} tokens after {context}: {tokens * seconds[context, 1] / seconds[context, tokens]:.1f}×"
        for context, tokens in sorted(seconds)
        if (context, 1) in seconds and SHORTEST <= tokens <= LONGEST
    ]
    if not cells:
        raise KeyError("samples")
    return ", ".join(cells)


def changes(pool: Pool, without: str) -> str:
    """Return the change of throughput without a part, by the number of drafters."""
    ratios = {
        count: pool.value("tokens_per_s", f"{count}: {without}") / pool.value("tokens_per_s", f"{count}: fuse hedge")
        for count in COUNTS[1:]
    }
    return ", ".join(f"{count} drafters {ratio - 1:+.0%}" for count, ratio in ratios.items())


def lengths(pool: Pool, system: str) -> str:
    """Return acceptance lengths and throughputs by the number of drafters."""
    found = [pool.interval("acceptance", f"{count}: {system}") for count in COUNTS]
    speeds = [f"{pool.value('tokens_per_s', f'{count}: {system}'):.0f}" for count in COUNTS]
    return f"{', '.join(found)}; {', '.join(speeds)} tokens/s"


def compared(pool: Pool) -> str:
    """Return what more drafters bring without fusion and with it, and whether the paper has the same order."""
    cells = []
    for figure, words, form in (("acceptance", "acceptance length", "+.2f"), ("tokens_per_s", "throughput", "+.0%")):
        plain, fused = (added(pool, figure, system) for system in ("no fusion", "fuse hedge"))
        agrees = "the same order as the paper's" if plain < fused else "against the paper"
        cells.append(f"{words} {plain:{form}} without fusion and {fused:{form}} with it, {agrees}")
    length, nodes = (pool.found["options"][name] for name in ("length", "nodes"))
    return (
        f"from 2 to 4 drafters {'; '.join(cells)}; one drafter has a chain of {length} tokens without fusion, a tree "
        f"of at most {nodes} with it"
    )


def added(pool: Pool, figure: str, system: str) -> float:
    """Return by how much a figure grows from 2 to 4 drafters; throughput as a share."""
    few, many = (pool.value(figure, f"{count}: {system}") for count in COUNTS[1:])
    return many - few if figure == "acceptance" else many / few - 1
