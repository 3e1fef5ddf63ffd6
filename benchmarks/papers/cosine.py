"""CoSine: drafters working together. ``python -m benchmarks.papers.cosine [--run]``."""

from __future__ import annotations

from benchmarks.papers import cosine_arrivals, cosine_losses, cosine_nodes, cosine_offline, cosine_online_nodes
from benchmarks.papers.command import main
from benchmarks.papers.common import PLOT, Page, Section, unclear
from benchmarks.papers.comparisons import COMPARED, over_plain
from benchmarks.papers.confidences import by_probability
from benchmarks.papers.cosine_claims import claims
from benchmarks.papers.cosine_failures import FAILURES, OUTAGES, failures, outages
from benchmarks.papers.cosine_online import MODES, online
from benchmarks.papers.cosine_parts import PARTS, parts
from benchmarks.papers.cosine_stages import STAGES, stages
from benchmarks.papers.cosine_structures import structures
from benchmarks.papers.large_targets import LLAMA, QWEN
from benchmarks.papers.not_run import not_run, remaining
from benchmarks.papers.pools import CARD, DOMAINS, POOL, Pool, of_all_steps
from benchmarks.papers.sources import Found, Results
from cospec.training.eval_acceptance import DEPTH, LENGTH

LEAST, MOST = 1.73, 3.20  # of trained drafters; the paper decodes greedily
RANGE = f"{LEAST:.2f} to {MOST:.2f}"
NAMES = ("generic", *DOMAINS, "copy")
TEMPERATURES = (0.0, 0.8)
SOURCES = (*MODES.values(), PARTS, FAILURES, OUTAGES, STAGES, cosine_offline.OFFLINE, LLAMA, *QWEN.values())


def page(results: Results) -> Page:
    """What the paper's text has in numbers; its tables are pictures, of which the text quotes ranges."""
    sections = (
        drafters(results),
        card(results),
        structures(results),
        by_probability(results),
        offline(results),
        cosine_nodes.section(results),
        cosine_losses.stages(results),
        cosine_losses.losses(results),
        *cosine_offline.sections(results),
        stages(results),
        online(results),
        cosine_online_nodes.section(results),
        *cosine_arrivals.sections(results),
        parts(results),
        failures(results),
        outages(results),
        ablation(results),
        remaining(results, "cosine", *claims(results)),
    )
    return Page("cosine", "CoSine", sections, results.here)


def drafters(results: Results) -> Section:
    """Table 2 and figure 3(a)."""
    rows = [
        results.row(
            f"{name}, temperature {temperature:g}",
            RANGE if temperature == 0.0 and name in DOMAINS else "",
            POOL,
            lambda found, name=name, t=temperature: by_domain(Pool(found), name, t),
        )
        for temperature in TEMPERATURES
        for name in NAMES
    ]
    rows += [
        results.row(
            f"Best over worst trained drafter on {domain}, temperature 0",
            f"exceeding 2 (of 'efficiency'; table 2's range gives at most {MOST / LEAST:.2f}, computed)",
            POOL,
            lambda found, domain=domain: variance(Pool(found), domain),
        )
        for domain in DOMAINS
    ]
    return Section(
        "Table 2 and figure 3(a): every drafter on every domain, mean acceptance length",
        tuple(rows),
        "Drafts have four tokens. One drafter is generic, one is trained for each domain, and *copy* is prompt lookup. "
        "The paper's range is of six drafters with domains of their own, tuned on five sets of questions. The paper "
        "calls its number an "
        "acceptance ratio and does not say whether the target's token counts. Ours counts the target's token; *best "
        f"over worst* is given both ways. {results.sentence(POOL, lengths)} "
        f"{results.sentence(POOL, of_all_steps)}",
    )


def card(results: Results) -> Section:
    """Table 2 once more, as the models' card has it."""
    rows = [
        results.row(
            f"{'generic' if name == 'drafter' else name}, temperature {temperature}",
            RANGE if temperature == "0" and name in DOMAINS else "",
            CARD,
            lambda found, name=name, t=temperature: on_card(found, t, name),
        )
        for temperature in ("0", "1")
        for name in ("drafter", *DOMAINS)
    ]
    return Section(
        "Table 2 on held-out prompts of the training's own domains",
        tuple(rows),
        "The figures stand in the models' card, which the training writes. They count the target's token. Drafts have "
        f"{DEPTH} tokens, outputs at most {LENGTH}. The command needs the checkpoints that `cospec train` leaves in "
        "`runs/zoo`.",
    )


def offline(results: Results) -> Section:
    """Figure 6(c): throughput at fixed batch sizes."""
    gain = "1.31× (batch 1) to 1.62× (batch 16, LLaMA pair)"
    rows = [
        results.row(f"One drafter over plain decoding, batch {batch}", PLOT, source, over_plain)
        for batch, source in COMPARED.items()
    ]
    rows += [
        results.row("fuse over SpecInfer, batch 8", gain, POOL, lambda f: over(f, "union all")),
        results.row("fuse with routing explore over SpecInfer, batch 8", gain, POOL, explored),
        results.row("fuse over the best single drafter, batch 8", "", POOL, over_best),
        results.row("fuse over the best single drafter's tree of as many nodes", "", POOL, over_tree),
        results.row("mix over SpecInfer, batch 8", "", POOL, lambda f: Pool(f).speed("mix hedge", "union all")),
    ]
    return Section(
        "Figure 6(c): throughput at fixed batch sizes, on two shared cores",
        tuple(rows),
        "Domains are mixed, decoding is greedy. In the paper drafters have GPUs of their own and work at the same "
        "time as the target, on another batch. Here drafters and target share two cores and take turns. SpecInfer is "
        "trees of all drafters. Each pool has four model drafters and prompt lookup. Here the models go on from the "
        "fused token at every step, as in the paper's algorithm 1. Equation 4 also continues from each drafter's own "
        "token, which is left out here. Prompt lookup gives whole drafts. Routing is `hedge` (arXiv 2510.20064); "
        "`explore` is CoSine's equations 1 to 3, with corrections. `mix` draws tokens from the weighted mixture of all "
        "drafters, which is a "
        f"vote where decoding is greedy. Trees have at most eight tokens. {results.sentence(POOL, sizes)} "
        f"{compared(results)}{results.sentence(POOL, slower)}",
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
    rows.append(
        not_run(
            "Acceptance length of 8 drafters",
            "acceptance improves with the nodes, without numbers",
            "The package has four model drafters. Eight nodes, two of each drafter, stand above, emulated.",
        )
    )
    return Section(
        "Ablation and second figure 6: on two shared cores",
        tuple(rows),
        "Changes are against `fuse` with routing `hedge`, mixed domains, greedy, batch 8. The drafters are models, "
        "without prompt lookup, and fuse token by token. No routing asks all drafters. No fusion merges the drafts as "
        "trees; on nodes, above, no fusion is one drafter per request. The paper's first part is the whole cooperative "
        "generation, which is more than routing.",
    )


def by_domain(pool: Pool, name: str, temperature: float) -> str:
    """One drafter on all domains."""
    cells = [f"{domain} {pool.interval('acceptance', name, domain, temperature)}" for domain in DOMAINS]
    return ", ".join(cells)


def variance(pool: Pool, domain: str) -> str:
    """How far apart the trained drafters are on a domain, with and without the target's token.

    Raises:
        KeyError: there are not two.
    """
    found = {name: pool.value("acceptance", name, domain) for name in pool.drafters if name in DOMAINS}
    if len(found) < 2:
        raise KeyError("drafters")
    best, worst = max(found, key=lambda n: found[n]), min(found, key=lambda n: found[n])
    own, other = found[best], found[worst]
    return f"{(own - 1) / (other - 1):.2f}, {own / other:.2f} with the target's token ({best} over {worst})"


def lengths(found: Found) -> str:
    """How much was run for acceptance lengths."""
    return "{prompts} prompts of each domain, {tokens} tokens; acceptance is of the first repeat.".format_map(
        found["options"]
    )


def sizes(found: Found) -> str:
    """How much was run of pools."""
    return (
        "Rows of pools: {prompts} prompts of each workload, {tokens} tokens, {repeats} repeats. Ratios of throughput "
        "are of medians and have no intervals."
    ).format_map(found["options"])


def compared(results: Results) -> str:
    """How much was run of one drafter against plain decoding; empty where it was not."""
    form = "{num_prompts} prompts of {output_len} output tokens at batch {batch_size}"
    cells = [results.sentence(source, lambda found: form.format_map(found["settings"])) for source in COMPARED.values()]
    if not all(cells):
        return ""
    return f"The first two rows are of another command and of time per token. They have {', and '.join(cells)}. "


def on_card(found: Found, temperature: str, name: str) -> str:
    """One line of the card's table; a card from before there were several has none."""
    if "agreement" not in found:
        raise KeyError("agreement")
    domains = found["acceptance"][temperature][name]
    return ", ".join(f"{domain} {figures['acceptance_length']:.2f}" for domain, figures in domains.items())


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


def slower(found: Found) -> str:
    """Why fusion loses: how long the steps take."""
    pool = Pool(found)
    systems = {"fuse": "fuse hedge", "fuse with explore": "fuse explore", "SpecInfer": "union all"}
    cells = "; ".join(f"{words} {pool.step(name)}" for words, name in systems.items())
    chain = pool.best_single()
    return f"A step takes: {cells}; a chain of {chain} {pool.step(chain)}."


def over_tree(found: Found) -> str:
    """Acceptance length of fusion with routing over the best tree of one drafter, and of which."""
    wanted = ("fuse", "mixed", 0.0)
    for row in found["same_nodes"]:
        if (row["combiner"], row["workload"], row["temperature"]) == wanted:
            middle, low, high = row["best tree"]
            said = f"acceptance length {middle:.2f}× ({low:.2f} to {high:.2f}{unclear(low, high)})"
            return f"{said} of {row['of']}"
    raise KeyError("fuse")


def lost(pool: Pool, count: int, without: str) -> str:
    """Change of throughput and acceptance length without a part."""
    changes = [
        pool.value(figure, f"{count}: {without}") / pool.value(figure, f"{count}: fuse hedge") - 1
        for figure in ("tokens_per_s", "acceptance")
    ]
    return f"{changes[0]:+.0%} throughput, {changes[1]:+.0%} acceptance length"


if __name__ == "__main__":
    main("cosine")
