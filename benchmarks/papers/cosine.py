"""CoSine: drafters working together. ``python -m benchmarks.papers.cosine [--run]``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers import cosine_nodes, cosine_offline
from benchmarks.papers.command import main
from benchmarks.papers.common import How, Page, Section
from benchmarks.papers.comparisons import COMPARED, over_plain
from benchmarks.papers.confidences import by_probability
from benchmarks.papers.cosine_parts import PARTS, parts
from benchmarks.papers.large_targets import QWEN
from benchmarks.papers.not_run import not_run, remaining
from benchmarks.papers.pools import DOMAINS, POOL, Pool
from benchmarks.papers.scenarios import Runs, scenario
from benchmarks.papers.sources import Found, Results, Source

MODES = {name: scenario(f"cosine-{name}") for name in ("low", "high", "fluctuating")}
CARD = Source("src/cospec/zoo/card.json", "cospec train evaluate --out runs/zoo --to src/cospec/zoo", How.MEASURED)
RANGE = "1.73 to 3.20"  # of trained drafters; the paper decodes greedily
NAMES = ("generic", *DOMAINS, "copy")
TEMPERATURES = (0.0, 0.8)
STRUCTURES = {"a tree of 8 of the generic drafter": "generic tree", "a tree of 8 of all drafters": "union all"}
CHAIN = "generic"
SPECINFER = "specinfer"  # trees of all drafters in turn with verification, the paper's strongest baseline
SOURCES = (*MODES.values(), PARTS, cosine_offline.OFFLINE, *QWEN.values())
WORDS = {"cosine": "vote", "cosine ahead": "vote, drafting ahead", "cosine fused": "fuse"}  # variants of the scenarios


def page(results: Results) -> Page:
    """What the paper's text has in numbers; its tables are pictures, of which the text quotes ranges."""
    sections = (
        drafters(results),
        card(results),
        by_probability(results),
        offline(results),
        cosine_nodes.section(results),
        *cosine_offline.sections(results),
        online(results),
        parts(results),
        ablation(results),
        remaining("cosine"),
    )
    return Page("cosine", "CoSine", sections, results.here)


def drafters(results: Results) -> Section:
    """Table 2 and figure 3(a)."""
    rows = [
        results.row(
            f"{name}, temperature {temperature:g}",
            RANGE if temperature == 0.0 and name != "copy" else "",
            POOL,
            lambda found, name=name, t=temperature: by_domain(Pool(found), name, t),
        )
        for temperature in TEMPERATURES
        for name in NAMES
    ]
    rows += [
        results.row(
            f"Best over worst trained drafter on {domain}",
            "exceeding 2",
            POOL,
            lambda found, domain=domain: variance(Pool(found), domain),
        )
        for domain in DOMAINS
    ]
    rows += [
        results.row(
            f"Figure 2(b): {words}, over a chain of 4 of the generic drafter",
            "trees over chains, several drafters over one, without numbers",
            POOL,
            lambda found, name=name: structure(Pool(found), name),
        )
        for words, name in STRUCTURES.items()
    ]
    return Section(
        "Table 2, figures 2(b) and 3(a): every drafter on every domain, mean acceptance length",
        tuple(rows),
        "Drafts have four tokens. One drafter is generic, one is trained for each domain, and *copy* is prompt lookup. "
        "The paper's range is of six drafters, each tuned on one of five sets of questions. The paper calls its number "
        "an acceptance ratio and does not say whether the target's token counts. Ours counts the target's token. "
        "*Best over worst* counts accepted draft tokens only. In figure 2(b) the paper shows speedups; here drafters "
        "and target share two cores.",
    )


def card(results: Results) -> Section:
    """Table 2 once more, as the models' card has it."""
    rows = [
        results.row(
            f"{'generic' if name == 'drafter' else name}, temperature {temperature}",
            RANGE if temperature == "0" else "",
            CARD,
            lambda found, name=name, t=temperature: on_card(found, t, name),
        )
        for temperature in ("0", "1")
        for name in ("drafter", *DOMAINS)
    ]
    return Section(
        "Table 2 on held-out prompts of the training's own domains",
        tuple(rows),
        "The figures stand in the models' card, which the training writes. They count the target's token.",
    )


def offline(results: Results) -> Section:
    """Figures 6(c) and 6(d): throughput at fixed batch sizes."""
    rows = [
        results.row(f"One drafter over plain decoding, batch {batch}", "", source, over_plain)
        for batch, source in COMPARED.items()
    ]
    rows += [
        results.row("fuse over SpecInfer, batch 8", "1.31 to 1.62×", POOL, lambda f: over(f, "union all")),
        results.row("fuse with routing explore over SpecInfer, batch 8", "1.31 to 1.62×", POOL, explored),
        results.row("fuse over the best single drafter, batch 8", "", POOL, over_best),
        results.row("fuse over the best single drafter's tree of as many nodes", "", POOL, over_tree),
        results.row("mix over SpecInfer, batch 8", "", POOL, lambda f: Pool(f).speed("mix hedge", "union all")),
    ]
    return Section(
        "Figures 6(c) and 6(d): throughput at fixed batch sizes, on two shared cores",
        tuple(rows),
        "Domains are mixed, decoding is greedy. In the paper drafters have GPUs of their own and work ahead. Here "
        "drafters and target share two cores and take turns. SpecInfer is trees of all drafters. Routing is `hedge` "
        "(arXiv 2510.20064); `explore` is CoSine's own routing.",
    )


def online(results: Results) -> Section:
    """Figure 7: three modes of arrivals."""
    papers = {"low": "1.2 to 1.5×", "high": "1.3 to 1.6×", "fluctuating": "1.2 to 1.4×"}
    rows = []
    for mode, source in MODES.items():
        found = results.read(source)
        names = Runs(found).variants if found else ("cosine",)
        for name in (name for name in names if name.startswith("cosine")):
            rows += [
                results.row(
                    f"{mode}: latency of SpecInfer over that of {WORDS[name]}",
                    papers[mode],
                    source,
                    lambda found, name=name: over_coupled(Runs(found), name, (SPECINFER,)),
                ),
                results.row(
                    f"{mode}: latency of the best system in turn over that of {WORDS[name]}",
                    "",
                    source,
                    lambda found, name=name: over_coupled(Runs(found), name, coupled(Runs(found))),
                ),
            ]
    return Section(
        "Figure 7: latency of online serving",
        tuple(rows),
        "The target has the times of a 70B model, the drafters have nodes of their own. The systems in turn are plain "
        "decoding (`off`), one drafter, and SpecInfer: trees of ten tokens of all drafters. The one drafter drafts "
        "five tokens, or lengths by goodput. Drafts are recorded, as in the gain by parts. `vote` and `fuse` are "
        "pipelined. `vote` has lengths by goodput; `fuse`, CoSine's combiner, has trees of ten tokens. In brackets are "
        "the target's mean batch and the acceptance length. Pipelining halves batches, which costs most at low load. "
        "Trees make verification expensive at high load.",
    )


def ablation(results: Results) -> Section:
    """What fusion and routing bring, by drafters."""
    said = {f"no {part}": cosine_nodes.PARTS[f"without {part}"] for part in ("routing", "fusion")}
    rows = [
        results.row(
            f"{without}, of {count} drafters",
            said[without],
            POOL,
            lambda found, count=count, without=without: lost(Pool(found), count, without),
        )
        for count in (2, 4)
        for without in said
    ]
    rows += [
        results.row(
            f"Acceptance length of {count} drafter{'s' if count > 1 else ''}",
            "acceptance improves with the nodes, without numbers",
            POOL,
            lambda found, count=count: Pool(found).interval("acceptance", f"{count}: fuse hedge"),
        )
        for count in (1, 2, 4)
    ]
    rows.append(not_run("Acceptance with 8 nodes", "the largest improvement", "The package has four drafters."))
    return Section(
        "Ablation and second figure 6: on two shared cores",
        tuple(rows),
        "Changes are against `fuse` with routing `hedge`, mixed domains, greedy, batch 8. No routing asks all "
        "drafters. No fusion merges the drafts as trees. The paper's first part is the whole cooperative generation, "
        "which is more than routing.",
    )


def by_domain(pool: Pool, name: str, temperature: float) -> str:
    """One drafter on all domains."""
    cells = [f"{domain} {pool.interval('acceptance', name, domain, temperature)}" for domain in DOMAINS]
    return ", ".join(cells)


def variance(pool: Pool, domain: str) -> str:
    """How far apart the model drafters are on a domain, in drafted tokens that were accepted.

    Raises:
        KeyError: there are not two.
    """
    accepted = {name: pool.value("acceptance", name, domain) - 1 for name in pool.drafters if name != "copy"}
    if len(accepted) < 2:
        raise KeyError("drafters")
    best, worst = max(accepted, key=lambda n: accepted[n]), min(accepted, key=lambda n: accepted[n])
    return f"{accepted[best] / accepted[worst]:.2f} ({best} over {worst}, accepted draft tokens)"


def on_card(found: Found, temperature: str, name: str) -> str:
    """One line of the card's table; a card from before there were several has none."""
    if "agreement" not in found:
        raise KeyError("agreement")
    domains = found["acceptance"][temperature][name]
    return ", ".join(f"{domain} {figures['acceptance_length']:.2f}" for domain, figures in domains.items())


def structure(pool: Pool, name: str) -> str:
    """Speed over a chain, and the acceptance lengths of both."""
    speed = pool.value("tokens_per_s", name) / pool.value("tokens_per_s", CHAIN)
    lengths = [pool.interval("acceptance", each) for each in (name, CHAIN)]
    return f"{speed:.2f}×, acceptance length {lengths[0]} against {lengths[1]}"


def explored(found: Found) -> str:
    """Fusion with CoSine's own routing over SpecInfer."""
    return Pool(found).speed("fuse explore", "union all")


def over(found: Found, other: str) -> str:
    """Fusion with routing over another system."""
    return Pool(found).speed("fuse hedge", other)


def over_best(found: Found) -> str:
    """Fusion with routing over the best single drafter."""
    best = Pool(found).best_single()
    return f"{over(found, best)} of {best}"


def over_tree(found: Found) -> str:
    """Acceptance length of fusion with routing over the best tree of one drafter, and of which."""
    wanted = ("fuse", "mixed", 0.0)
    for row in found["same_nodes"]:
        if (row["combiner"], row["workload"], row["temperature"]) == wanted:
            return "acceptance length {:.2f}× ({:.2f} to {:.2f})".format(*row["best tree"]) + f" of {row['of']}"
    raise KeyError("fuse")


def coupled(runs: Runs) -> tuple[str, ...]:
    """The systems that take turns, no speculation among them."""
    return tuple(each for each in runs.variants if not each.startswith("cosine"))


def over_coupled(runs: Runs, name: str, others: Sequence[str]) -> str:
    """How many times the latency the best of the others has."""
    best = min(others, key=runs.latency)
    parts = [
        f"batch {runs.at(each)['mean_batch']:.1f}, length {runs.at(each)['mean_acceptance_length']:.2f}"
        for each in (best, name)
    ]
    return f"{runs.latency(best) / runs.latency(name):.2f}× ({best}: {parts[0]}; {WORDS[name]}: {parts[1]})"


def lost(pool: Pool, count: int, without: str) -> str:
    """Change of throughput and acceptance length without a part."""
    changes = [
        pool.value(figure, f"{count}: {without}") / pool.value(figure, f"{count}: fuse hedge") - 1
        for figure in ("tokens_per_s", "acceptance")
    ]
    return f"{changes[0]:+.0%} throughput, {changes[1]:+.0%} acceptance length"


if __name__ == "__main__":
    main("cosine")
