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
CARD = Source("src/cospec/zoo/card.json", "cospec train evaluate --out runs/zoo --to src/cospec/zoo", How.MEASURED)
RANGE = "1.73 to 3.20"  # of trained drafters; the paper decodes greedily
NAMES = ("generic", *DOMAINS, "copy")
TEMPERATURES = (0.0, 0.8)
STRUCTURES = {"a chain of 4": "generic", "a tree of 8": "generic tree", "a tree of 8 of all drafters": "union all"}
SPECINFER = "specinfer"  # trees of all drafters in turn with verification, the paper's strongest baseline
PRICES = scenario("cosine-cost")
SOURCES = (*MODES.values(), PARTS, PRICES)
BASELINES = {
    "plain": ("plain decoding (vLLM)", "3.15 to 4.71× (LLaMA pair), 2.84 to 3.79× (Qwen pair)"),
    "one-drafter": ("one drafter in turn (vanilla speculation)", ""),
    "specinfer": ("trees of all drafters in turn (SpecInfer)", "1.31 to 1.62× (LLaMA pair)"),
    "pipeinfer": ("one drafter ahead (PipeInfer)", "1.24 to 1.46× (LLaMA pair)"),
}


def page(results: Results) -> Page:
    """What the paper's text has in numbers; its tables are pictures, of which the text quotes ranges."""
    sections = (
        drafters(results),
        card(results),
        offline(results),
        baselines(results),
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
            f"Figure 2(b): acceptance length of {words}",
            "speedup, without numbers: trees over chains, several drafters over one",
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
        "From the models' card, which is written where they are trained.",
    )


def offline(results: Results) -> Section:
    """Figures 6(c) and 6(d): throughput at fixed batch sizes."""
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
        "Figures 6(c) and 6(d): throughput at fixed batch sizes, on two shared cores",
        tuple(rows),
        "Mixed domains, greedy. In the paper drafters have GPUs of their own and work ahead. Here drafters and target "
        "share two cores and take turns, so that every drafter more takes time from the target.",
    )


def baselines(results: Results) -> Section:
    """Figures 6(c) and 6(d), and table 3: four systems that the paper compares with, on machines of their own."""
    rows = [
        results.row(
            f"Throughput of CoSine over {words}, 16 requests",
            paper,
            PRICES,
            lambda found, name=name: f"{Runs(found).throughput('cosine') / Runs(found).throughput(name):.2f}×",
        )
        for name, (words, paper) in BASELINES.items()
    ]
    rows.append(
        results.row("Table 3: price of a million tokens", "a picture of a table", PRICES, lambda f: prices(Runs(f)))
    )
    return Section(
        "Figures 6(c) and 6(d), table 3: throughput and price against four systems",
        tuple(rows),
        "A 70B target with drafters on nodes of their own, drafts of five, recorded as in the gain by parts. The "
        "baselines are the systems of `examples/baselines/`. Prices per hour are 6 for the target and 0.15 for each "
        "drafter, from public offers. The paper's ranges are over batches of 1 to 16.",
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
                    f"{mode}: latency of SpecInfer over that of {name}",
                    papers[mode],
                    source,
                    lambda found, name=name: over_coupled(Runs(found), name, (SPECINFER,)),
                ),
                results.row(
                    f"{mode}: latency of the best system in turn over that of {name}",
                    "",
                    source,
                    lambda found, name=name: over_coupled(Runs(found), name, coupled(Runs(found))),
                ),
            ]
    return Section(
        "Figure 7: latency of online serving",
        tuple(rows),
        "A 70B target with drafters on nodes of their own, pipelined. The systems in turn are plain decoding, one "
        "drafter with five tokens or with lengths by goodput, and SpecInfer: trees of ten tokens of all drafters. "
        "Drafts are recorded, as in the gain by parts. `cosine` votes with lengths by goodput, `cosine ahead` drafts "
        "ahead, `cosine fused` fuses trees of ten tokens. In brackets are the target's mean batch and the acceptance "
        "length: pipelining halves batches, which costs most at low load; trees make verification dear at high load.",
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
    parts = [
        f"batch {runs.at(each)['mean_batch']:.1f}, length {runs.at(each)['mean_acceptance_length']:.2f}"
        for each in (best, name)
    ]
    return f"{runs.latency(best) / runs.latency(name):.2f}× ({best}: {parts[0]}; {name}: {parts[1]})"


def prices(runs: Runs) -> str:
    """The price of a million tokens of each system.

    Raises:
        KeyError: a system has no price.
    """
    return ", ".join(f"{name} {runs.at(name)['price_per_million_tokens']:.2f}" for name in runs.variants)


def lost(pool: Pool, count: int, without: str) -> str:
    """Change of throughput and acceptance length without a part."""
    changes = [
        pool.value(figure, f"{count}: {without}") / pool.value(figure, f"{count}: fuse hedge") - 1
        for figure in ("tokens_per_s", "acceptance")
    ]
    return f"{changes[0]:+.0%} throughput, {changes[1]:+.0%} acceptance length"


if __name__ == "__main__":
    main("cosine")
