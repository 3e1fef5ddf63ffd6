"""CoSine's offline serving and prices, simulated: five systems at batches of 1 to 16, with drafters on nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.papers.common import PLOT, Row, Section, paragraph
from benchmarks.papers.cosine_nodes import SIZES, WHOLE_DRAFTS
from benchmarks.papers.large_targets import LLAMA, QWEN, SHARES, draft_token_ms, llama_scenario, qwen_scenario
from benchmarks.papers.scenarios import Runs, inputs, scenario
from benchmarks.papers.sources import Results, Source

OFFLINE = scenario("cosine-cost")
WHOLE, SPECINFER, PIPEINFER = "cosine", "specinfer", "pipeinfer"
AFTER = "cosine outcomes"  # drafts after outcomes in place of the pipeline
SIZED = "cosine goodput outcomes"  # the same with sizes of trees by goodput
BATCHES, LARGE = (1.0, 2.0, 4.0, 8.0, 16.0), (8.0, 16.0)  # the paper does not say which batches are large
BASELINES = {
    "plain": ("plain decoding (vLLM)", "3.15 to 4.71× (LLaMA pair)"),
    "one-drafter": ("one drafter in turn (vanilla speculation)", PLOT),
    SPECINFER: ("SpecInfer", "1.31× (batch 1) to 1.62× (batch 16, LLaMA pair)"),
    PIPEINFER: ("one drafter ahead (PipeInfer)", "1.24× (batch 1) to 1.46× (batch 16, LLaMA pair)"),
}
LLAMA_SAID = {name: paper for name, (_, paper) in BASELINES.items()}
BEST = "17.9 to 27.1% less; strongest are SpecInfer at small, PipeInfer at large batches (LLaMA pair)"


def sections(results: Results) -> tuple[Section, Section, Section]:
    """Figures 6(a) to 6(d), and table 3."""
    return throughputs(results), qwen(results), prices(results)


def throughputs(results: Results) -> Section:
    """Throughput and latency at each batch."""
    rows = [
        results.row(
            f"Throughput of CoSine over {words}",
            paper,
            OFFLINE,
            lambda found, name=name: by_batch(Runs(found), name),
            "the paper's gain grows with the batch, ours shrinks" if name == "plain" else "",
        )
        for name, (words, paper) in BASELINES.items()
    ]
    rows += [
        *latency(results, OFFLINE, "Figure 6(a)", BEST, "22.4% less (LLaMA pair)"),
        results.row(
            "Change of latency from batch 1 to 16",
            "CoSine 23%, baselines 43%",
            OFFLINE,
            lambda found: ", ".join(growth(Runs(found), name) for name in Runs(found).variants),
            "forwards verify more tokens; CoSine's requests also wait for a target that has no idle time left",
        ),
        *steps(results, OFFLINE),
    ]
    rows += [
        results.row(
            f"Throughput of CoSine over the fastest baseline by parts, batch {batch:g}",
            "",
            OFFLINE,
            lambda found, batch=batch: over_fastest(Runs(found), batch),
        )
        for batch in BATCHES
    ]
    rows += after_outcomes(results, OFFLINE)
    at = f", {draft_token_ms(llama_scenario()):.1f} ms a draft token"
    rows += [
        results.row(
            f"Throughput of CoSine over {words}{at}",
            paper,
            LLAMA,
            lambda found, name=name: by_batch(Runs(found), name),
        )
        for name, (words, paper) in BASELINES.items()
    ]
    rows += latency(results, LLAMA, "Figure 6(a)", BEST, "22.4% less (LLaMA pair)", at)
    rows += after_outcomes(results, LLAMA, at)
    return Section(
        "Figures 6(a) and 6(c): latency and throughput at batches of 1 to 16, simulated",
        tuple(rows),
        paragraph(
            "The target has the times of a 70B model on four A100, the drafters have nodes of their own. These times "
            "are assumed. So are 4 ms for a draft token, in the rows without a time and in the other simulations of "
            "this paper without another time. That is high: by sizes, bandwidth and FLOP/s "
            f"(`benchmarks/papers/large_targets.py`), {SHARES}, 68M on an RTX 2080 Ti takes "
            f"{draft_token_ms(llama_scenario()):.1f} ms, without launches of kernels. The last rows have this time: "
            "there drafts take little, so the pipeline hides little and halves the batch, and drafts after outcomes "
            "gain little. "
            "Drafts are recorded, as in the gain by parts, and are at most five tokens deep. SpecInfer unites trees "
            "of all drafters, CoSine fuses them; trees have at most ten tokens.",
            WHOLE_DRAFTS,
            "CoSine is pipelined and routes by `hedge` (arXiv 2510.20064). *After outcomes* is the mode "
            "`draft-for-outcomes` in place of the pipeline, which no paper here has.",
            SIZES,
            f"Links take 0 ms; the paper's are below 1 ms, and of 100 Mbit/s between drafters. {inputs()} *Batch* is "
            "the number of requests in the engine for every system. Pipelining halves CoSine's batch in the target; "
            "Minions' pipeline gets twice the requests instead. The parts of a throughput multiply to its ratio. "
            "`examples/baselines/` has five systems of the same kinds: pools of three drafters, CoSine with routing "
            "`explore`, other trees and prices.",
            "The paper's figures are means of 10 trials with 95% intervals (6.1), ours are of one seed.",
        ),
    )


def after_outcomes(
    results: Results,
    source: Source,
    at: str = "",
    said: Mapping[str, str] = LLAMA_SAID,
    best: str = BEST,
) -> list[Row]:
    """The same with drafts after outcomes in place of the pipeline.

    Args:
        said: the paper's words on each baseline.
        best: on the latency against the best one.
    """
    rows = [
        results.row(
            f"Throughput of CoSine after outcomes over {words}{at}",
            said[name],
            source,
            lambda found, name=name: by_batch(Runs(found), name, AFTER),
        )
        for name, (words, _) in BASELINES.items()
    ]
    rows += [
        results.row(
            f"Latency of CoSine after outcomes{words} against the best baseline{at}",
            best,
            source,
            lambda found, system=system: latencies(Runs(found), BASELINES, system=system),
        )
        for system, words in ((AFTER, ""), (SIZED, ", of goodput,"))
    ]
    rows.append(
        results.row(
            f"Throughput of CoSine after outcomes, of goodput, at equal cost, over the best baseline{at}",
            "up to 32.5% more (abstract)",
            source,
            lambda found: at_equal_cost(Runs(found), system=SIZED),
        )
    )
    return rows


def qwen(results: Results) -> Section:
    """Figures 6(b) and 6(d)."""
    rows = []
    for computed, source in QWEN.items():
        drafter = f"{draft_token_ms(qwen_scenario(computed)):.1f} ms"
        rows += [
            results.row(
                f"Throughput of CoSine over {words}, {drafter} a draft token",
                "2.84 to 3.79×" if name == "plain" else PLOT,
                source,
                lambda found, name=name: by_batch(Runs(found), name),
            )
            for name, (words, _) in BASELINES.items()
        ]
        at = f", {drafter} a draft token"
        rows += latency(results, source, "Figure 6(b)", "15.2 to 20.5% less", "17.9% less", at)
        said = {name: "2.84 to 3.79×" if name == "plain" else PLOT for name in BASELINES}
        rows += after_outcomes(results, source, at, said, "15.2 to 20.5% less")
        rows += steps(results, source, at)
    return Section(
        "Figures 6(b) and 6(d): the Qwen pair, simulated",
        tuple(rows),
        "A target of 32B on four A100 takes the place of the 70B target. Its times are computed from sizes, bandwidth "
        f"and FLOP/s (`benchmarks/papers/large_targets.py`), {SHARES}, and not measured. The lower time of a draft "
        "token is computed too, for 0.5B on an RTX 3090. The other rows keep the 4 ms of the LLaMA pair. The package's "
        "models made the drafts, so acceptance is not that of the Qwen pair. Trees and batches are those of figures "
        "6(a) and 6(c).",
    )


def latency(results: Results, source: Source, figure: str, best: str, large: str, at: str = "") -> list[Row]:
    """Latency against the best baseline, and against PipeInfer at large batches."""
    return [
        results.row(
            f"{figure}: latency of CoSine against the best baseline{at}",
            best,
            source,
            lambda found: latencies(Runs(found), BASELINES),
        ),
        results.row(
            f"{figure}: latency of CoSine against PipeInfer, large batches{at}",
            large,
            source,
            lambda found: latencies(Runs(found), (PIPEINFER,), LARGE),
        ),
    ]


def steps(results: Results, source: Source, at: str = "") -> list[Row]:
    """What a forward of the target verifies."""
    return [
        results.row(
            f"Drafted tokens of a request and step, mean at batch 16{at}",
            "",
            source,
            lambda found: ", ".join(
                f"{name} {Runs(found).at(name, 16.0)['mean_k']:.1f}" for name in (*BASELINES, WHOLE)
            ),
        ),
        results.row(
            f"Requests of a forward of the target, mean at batches of 1 to 16{at}",
            "",
            source,
            lambda found: "; ".join(
                f"{name} " + ", ".join(f"{Runs(found).at(name, batch)['mean_batch']:.1f}" for batch in BATCHES)
                for name in (SPECINFER, WHOLE)
            ),
        ),
    ]


def prices(results: Results) -> Section:
    """Table 3, and the abstract's comparison at equal cost."""
    rows: list[Row] = [
        results.row(
            f"Price of a million tokens, batch {batch:g}",
            "",
            OFFLINE,
            lambda found, batch=batch: ", ".join(
                f"{name} {Runs(found).price(name, batch):.2f}" for name in Runs(found).variants
            ),
        )
        for batch in BATCHES
    ]
    rows += [
        results.row(
            "Throughput at equal cost, over the best baseline",
            "up to 32.5% more (abstract, over a baseline that it does not name)",
            OFFLINE,
            lambda found: at_equal_cost(Runs(found)),
            "tokens for a price; where both cost as much, figure 6(c)'s ratio again",
        ),
        *(
            results.row(
                f"The same, drafting after outcomes{words}",
                "",
                OFFLINE,
                lambda found, system=system: at_equal_cost(Runs(found), system=system),
            )
            for system, words in ((AFTER, ""), (SIZED, ", of goodput"))
        ),
        results.row(
            "Throughput at equal cost, over plain decoding",
            "",
            OFFLINE,
            lambda found: at_equal_cost(Runs(found), ("plain",)),
            "tokens for a price; vLLM, the paper's baseline without drafts (6.1), is plain decoding here",
        ),
        results.row(
            "Latency at equal cost, against the best baseline",
            "up to 23.2% less (abstract, against a baseline that it does not name)",
            OFFLINE,
            lambda found: latencies(Runs(found), BASELINES),
            results.sentence(OFFLINE, lambda found: f"figure 6(a)'s row again, {unequal(Runs(found))}"),
        ),
    ]
    return Section(
        "Abstract: price, and gains at equal cost",
        tuple(rows),
        "The scenario is that of figures 6(a) and 6(c). Prices per hour are assumed: 6 for the target, 0.15 for each "
        "drafter. The paper's table 3, a picture, is of online serving; its counterpart stands below, with figure 7. "
        "The paper normalises its figures by computation, for fair comparisons of cost, and does not say how. Its "
        "abstract compares with baseline methods. We read that as the best one.",
    )


def growth(runs: Runs, name: str) -> str:
    """How much latency and the target's forward grow from the least batch to the largest, and how the target idles."""
    first, last = BATCHES[0], BATCHES[-1]
    latency = runs.latency(name, last) / runs.latency(name, first) - 1
    forward = runs.forward(name, last) / runs.forward(name, first) - 1
    idle = " to ".join(f"{runs.at(name, batch)['target_idle']:.0%}" for batch in (first, last))
    return f"{name} {latency:+.0%} (forward {forward:+.0%}, target idle {idle})"


def by_batch(runs: Runs, name: str, system: str = WHOLE) -> str:
    """Throughput of a system over that of another, at each batch."""
    found = [f"batch {b:g}: {runs.throughput(system, b) / runs.throughput(name, b):.2f}×" for b in BATCHES]
    return ", ".join(found)


def over_fastest(runs: Runs, batch: float) -> str:
    """Throughput over that of the baseline with the most, by parts."""
    best = max(BASELINES, key=lambda name: runs.throughput(name, batch))
    return f"{runs.by_parts(WHOLE, best, batch)} ({best})"


def latencies(runs: Runs, others: Iterable[str], batches: Sequence[float] = BATCHES, system: str = WHOLE) -> str:
    """Latency of a system against that of the best of some others, at each batch."""
    cells = []
    for batch in batches:
        best = min(others, key=lambda name: runs.latency(name, batch))
        change = runs.latency(system, batch) / runs.latency(best, batch) - 1
        cells.append(f"batch {batch:g}: {change:+.1%} ({best})")
    return ", ".join(cells)


def hourly(runs: Runs, name: str, batch: float) -> float:
    """Price of an hour."""
    return runs.price(name, batch) * runs.throughput(name, batch) * 3600 / 1e6


def unequal(runs: Runs) -> str:
    """Where the fastest baseline costs less than CoSine; empty where none does."""
    cells = []
    for batch in BATCHES:
        best = min(BASELINES, key=lambda name: runs.latency(name, batch))
        own, other = (f"{hourly(runs, name, batch):.2f}" for name in (WHOLE, best))
        if own != other:
            cells.append(f"at batch {batch:g} {best} costs {other} an hour, and {WHOLE} {own}")
    return "at equal cost" + (f", but {'; '.join(cells)}" if cells else "")


def at_equal_cost(runs: Runs, baselines: Iterable[str] = BASELINES, system: str = WHOLE) -> str:
    """Tokens of a system for a price against the cheapest of some baselines, at each batch."""
    cells = []
    for batch in BATCHES:
        best = min(baselines, key=lambda name: runs.price(name, batch))
        change = runs.price(best, batch) / runs.price(system, batch) - 1
        cells.append(f"batch {batch:g}: {change:+.1%} ({best})")
    return ", ".join(cells)
