"""CoSine: drafters working together. ``python -m benchmarks.papers.cosine [--run]``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.command import main
from benchmarks.papers.common import How, Page, Section
from benchmarks.papers.comparisons import COMPARED, over_plain
from benchmarks.papers.cosine_parts import PARTS, parts
from benchmarks.papers.not_run import remaining
from benchmarks.papers.pools import DOMAINS, POOL, Pool
from benchmarks.papers.scenarios import Runs, scenario
from benchmarks.papers.sources import Found, Results, Source

MODES = {name: scenario(f"cosine-{name}") for name in ("low", "high", "fluctuating")}
SOURCES = (*MODES.values(), PARTS)
CARD = Source("src/cospec/zoo/card.json", "cospec train evaluate --out runs/zoo --to src/cospec/zoo", How.MEASURED)
NAMES = ("generic", *DOMAINS, "copy")
TEMPERATURES = (0.0, 0.8)
STRUCTURES = {"a chain of 4": "generic", "a tree of 8": "generic tree", "a tree of 8 of all drafters": "union all"}
COUPLED = "coupled k=5"  # the scenarios' stand-in for the paper's strongest baseline


def page(results: Results) -> Page:
    """What the paper's text has in numbers; its tables are pictures, of which the text quotes ranges."""
    sections = (
        drafters(results),
        card(results),
        offline(results),
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
            "1.73 to 3.20",
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
            f"Figure 2(b): acceptance length of {words}",
            "trees over chains, several drafters over one",
            POOL,
            lambda found, name=name: Pool(found).interval("acceptance", name),
        )
        for words, name in STRUCTURES.items()
    ]
    return Section(
        "Table 2 and figure 3: every drafter on every domain, mean acceptance length",
        tuple(rows),
        "Drafts of four. One generic drafter, one for each domain, and prompt lookup (copy); the paper's six drafters "
        "are tuned on five sets of questions.",
    )


def card(results: Results) -> Section:
    """Table 2 once more, as the models' card has it."""
    rows = [
        results.row(
            f"{name}, temperature {temperature}",
            "1.73 to 3.20",
            CARD,
            lambda found, name=name, t=temperature: on_card(found, t, name),
        )
        for temperature in ("0", "1")
        for name in ("drafter", *DOMAINS)
    ]
    return Section(
        "Table 2 on held-out prompts of the training's own domains",
        tuple(rows),
        "From the models' card, which is written where they are trained.",
    )


def offline(results: Results) -> Section:
    """Figure 6: throughput at fixed batch sizes."""
    rows = [
        results.row(f"One drafter over plain decoding, batch {batch}", "", source, over_plain)
        for batch, source in COMPARED.items()
    ]
    rows += [
        results.row("fuse over union (SpecInfer), batch 8", "1.31 to 1.62×", POOL, lambda f: over(f, "union hedge")),
        results.row("fuse over the generic drafter, batch 8", "", POOL, lambda f: over(f, "generic")),
        results.row("fuse over the best single drafter, batch 8", "", POOL, over_best),
        results.row("fuse over the best single drafter's tree of as many nodes", "", POOL, over_tree),
        results.row("mix over union, batch 8", "", POOL, lambda f: Pool(f).speed("mix hedge", "union hedge")),
    ]
    return Section(
        "Figure 6: throughput at fixed batch sizes",
        tuple(rows),
        "Mixed domains, greedy. In the paper drafters have GPUs of their own, and CoSine reaches 3.15 to 4.71× vLLM. "
        "Here drafters and target share two cores, so that every drafter more takes time from the target.",
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
                    f"{mode}: latency of {COUPLED} over that of {name}",
                    papers[mode],
                    source,
                    lambda found, name=name: over_coupled(Runs(found), name, (COUPLED,)),
                ),
                results.row(
                    f"{mode}: latency of the best sequential system over that of {name}",
                    "",
                    source,
                    lambda found, name=name: over_coupled(Runs(found), name, coupled(Runs(found))),
                ),
            ]
    return Section(
        "Figure 7: latency of online serving",
        tuple(rows),
        "A 70B target with drafters on nodes of their own, pipelined, against drafting and verification in turn on one "
        "server: with fixed lengths, as the paper's baselines have, and with lengths by goodput. Drafts are recorded, "
        "as in the next section. `cosine` votes with lengths by goodput; `cosine fused` fuses trees of ten tokens.",
    )


def ablation(results: Results) -> Section:
    """Figure 8 of the paper's count: what fusion and routing bring, by drafters."""
    papers = {"no routing": "29 to 33% less throughput", "no fusion": "17 to 34% less throughput"}
    at_eight = {"no routing": "1.18 of 1.72 at 8 nodes", "no fusion": "1.13 of 1.72 at 8 nodes"}
    rows = [
        results.row(
            f"{without}, of {count}" + (" drafters" if count > 1 else " drafter"),
            papers[without],
            POOL,
            lambda found, count=count, without=without: lost(Pool(found), count, without),
            at_eight[without] if count == 4 else "",
        )
        for count in (1, 2, 4)
        for without in papers
    ]
    return Section(
        "Ablation: without routing, without fusion",
        tuple(rows),
        "Change against fuse with routing, mixed domains, greedy, batch 8. No fusion merges the drafts as they are.",
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
    return f"{runs.latency(best) / runs.latency(name):.2f}× ({best}, {runs.latency(best):.2f} s)"


def lost(pool: Pool, count: int, without: str) -> str:
    """Change of throughput and acceptance length without a part."""
    changes = [
        pool.value(figure, f"{count}: {without}") / pool.value(figure, f"{count}: fuse hedge") - 1
        for figure in ("tokens_per_s", "acceptance")
    ]
    return f"{changes[0]:+.0%} throughput, {changes[1]:+.0%} acceptance length"


if __name__ == "__main__":
    main("cosine")
