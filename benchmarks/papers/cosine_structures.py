"""CoSine's figure 2(b): speed by the length and the structure of drafts, and by the number of drafters."""

from __future__ import annotations

from benchmarks.papers.common import Section
from benchmarks.papers.confidences import CONFIDENCES, LENGTHS, share
from benchmarks.papers.pools import DOMAINS, POOL, Pool
from benchmarks.papers.smartspec_rates import MEASURED, fixed
from benchmarks.papers.sources import Found, Results

STRUCTURES = {"a tree of 8 of the generic drafter": "generic tree", "a tree of 8 of all drafters": "union all"}
CHAIN = "generic"


def structures(results: Results) -> Section:
    """Chains by length, then trees and several drafters."""
    rows = [
        results.row(
            f"Speedup of chains over no speculation at the lowest rate ({who})",
            "longer chains gain less and less, without numbers",
            source,
            lambda found: fixed(found, 1),
        )
        for who, source in MEASURED.items()
    ]
    rows.append(
        results.row(
            f"Acceptance length of chains of {', '.join(map(str, LENGTHS))}, temperature 0", "", CONFIDENCES, by_length
        )
    )
    rows += [
        results.row(
            f"{words}, over a chain of 4 of the generic drafter",
            "trees over chains, several drafters over one, without numbers",
            POOL,
            lambda found, name=name: structure(Pool(found), name),
        )
        for words, name in STRUCTURES.items()
    ]
    return Section(
        "Figure 2(b): speedup by structure of drafts and number of drafters",
        tuple(rows),
        "Speedups of chains are those of SmartSpec's figure 11; *k* is the length. Trees run at batch 8, and all "
        "drafters include prompt lookup. Trees lose by slower steps. "
        f"{results.sentence(POOL, steps)}",
    )


def steps(found: Found) -> str:
    """How long the steps of trees and of the chain take, and how much of it the pool's work is."""
    pool = Pool(found)
    cells = "; ".join(f"{words} {pool.step(name)}" for words, name in STRUCTURES.items())
    return f"A step takes: {cells}; a chain {pool.step(CHAIN)}."


def by_length(found: Found) -> str:
    """Tokens of a step for each domain and length, the target's token included."""
    cells = []
    for domain in DOMAINS:
        lengths = ", ".join(f"{1 + length * share(found, domain, 0.0, length)['value']:.2f}" for length in LENGTHS)
        cells.append(f"{domain} {lengths}")
    return "; ".join(cells)


def structure(pool: Pool, name: str) -> str:
    """Speed over a chain by its factors, and the acceptance lengths of both."""
    lengths = [pool.interval("acceptance", each) for each in (name, CHAIN)]
    return f"{pool.speed(name, CHAIN)}, acceptance length {lengths[0]} against {lengths[1]}"
