"""SmartSpec's figures 1 and 11: latency by request rate, simulated with large targets and measured with our models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.papers import large_targets
from benchmarks.papers import smartspec_figures as figures
from benchmarks.papers.common import PLOT, Row, Section, paragraph, unclear
from benchmarks.papers.curves import BASE, Curves
from benchmarks.papers.scenarios import FOLDER, Runs, scenario
from benchmarks.papers.sources import Found, Results, Source
from cospec.simulation.scenario import Scenario

RATES = scenario("smartspec-fig11")
SCENARIOS: Mapping[str, Callable[[], Scenario]] = {
    "7B": lambda: Scenario.read(FOLDER / "smartspec-fig11.yaml"),
    "33B": large_targets.vicuna_scenario,
    "70B": figures.large_scenario,
}
SIMULATED = {"7B": RATES, "33B": large_targets.VICUNA, "70B": figures.LARGE}
MEASURED = {
    who: Source(name, "python -m benchmarks.load")
    for who, name in {
        "bf16": "load_2-x-amd-epyc_avx512_bf16",
        "bf16, 2026-11-23": "load_2-x-amd-epyc_avx512_bf16_earlier",
        "bf16, 2026-11-22": "load",
        "bf16, 2026-11-28": "load_2-x-amd-epyc-family-26-model-2_avx512_bf16",
        "AVX-512": "load_2-x-amd-epyc_avx512",
        "AVX-512, 2026-11-28": "load_2-x-amd-epyc-family-26-model-2_avx512",
        "AVX2": "load_2-x-amd-epyc_avx2",
        "AVX2, 2026-11-28": "load_2-x-amd-epyc-family-26-model-2_avx2",
        "AVX2 alone": "load_2-x-amd-epyc-family-25-model-1_avx2",
    }.items()
}
LOW, HIGH = "1.2 to 3.2×", "not slower"
NEAR = "about 1; at some low rates a fixed length is slightly faster (section 7.1.1)"
REBOUND = "falls, then rebounds above 2/s in figures 11(d) and (e)"
FIRST, LONG = "7B", "k=5"  # the target of figure 1, and the longest of the fixed lengths
FIXED = ("k=1", "k=3", "k=5")
NOT_SLOWER = 1.05  # of parts over the ratio of latencies, above which the parts do not explain a loss
LARGER = "at lower rates for larger models (section 7.1.1)"
GPUS = {"7B": "one GPU", "33B": "four GPUs", "70B": "four GPUs"}


def rates(results: Results) -> Section:
    """Figures 1 and 11."""
    rows = [row for who, source in SIMULATED.items() for row in crossings(results, source, who)]
    rows += [row for who, source in MEASURED.items() for row in measured(results, source, who)]
    text = (
        "Rates are each machine's own; what carries over is the order of the curves and where they cross. The "
        "simulated targets have assumed times: 7B on one A100, 33B and 70B on four. The paper has 70B on eight. Its "
        "drafter is TinyLlama-1.1B in the paper's table 1 and Vicuna-7B in its text; ours takes 4 ms a token, assumed. "
        "Times of 33B are computed from sizes, bandwidth and FLOP/s (`benchmarks/papers/large_targets.py`), "
        f"{large_targets.SHARES}. The times of a cached token of 7B and of its drafter of 160M follow from this rule "
        "too. Acceptance is 0.7, inputs and outputs have 128 tokens, as in figure 1. Figure 1 is of 7B alone. Figure "
        "11 falls steeply at 32/s (c) and above 5/s (f), and rebounds after falls above 2/s (d, e); the paper does not "
        "name the panels' models, so no row has these rates. The measured rows are of every stored run without "
        "`--disturb`, with our models and prompts of three domains. *AVX2 alone* is a "
        "processor without AVX-512. `benchmarks/report/load.md` has the disturbed "
        "runs. Speedups of fixed lengths in measured rows are ratios of means without intervals; no speculation is one "
        "of the others. "
        f"{measured_losses(results)}The paper's 1.2 to 3.2× is over three data sets "
        "(conclusion) and five models (section 1), prompt lookup included."
    )
    title = "Figures 1 and 11: mean latency by request rate, over no speculation"
    return Section(title, tuple(rows), paragraph(text, losses(results), served(), queues(results), regions(results)))


def measured_losses(results: Results) -> str:
    """Parts of the largest losses of each measured run that stored its steps; words about the others."""
    ways = {"a fixed length": FIXED, "the default": ("auto",)}
    cells = {
        loser: [results.sentence(run, partial(measured_loss, who=who, names=names)) for who, run in MEASURED.items()]
        for loser, names in ways.items()
    }
    said = [
        f"Where {loser} loses most against no speculation: {'; '.join(cell for cell in each if cell)}."
        for loser, each in cells.items()
        if any(each)
    ]
    against = [results.sentence(run, partial(loss_to_best, who=who)) for who, run in MEASURED.items()]
    if any(against):
        losers = "; ".join(filter(None, against))
        said.append(f"Where the default clearly loses most to the best other length, by ratios of means: {losers}.")
    if not all(map(all, cells.values())):
        said.append(f"{'Other' if said else 'The'} measured runs stored latencies only, so their losses have no parts.")
    return f"{paragraph(*said)} " if said else ""


def measured_loss(found: Found, who: str, names: Sequence[str]) -> str:
    """Why the slowest of some configurations is slower than no speculation, by the steps of both.

    Raises:
        KeyError: the run stored no steps.
    """
    worst, row, name = 1.0, None, ""
    for each in found["rows"]:
        means = {config: figure["mean"] for config, figure in each["latency"].items()}
        for config in [config for config in names if config in each["parts"]]:
            if means[BASE] / means[config] < worst:
                worst, row, name = means[BASE] / means[config], each, config
    if row is None:
        return f"nowhere ({who})"
    return by_measured_steps(row["parts"], name, BASE, worst, f"{who}, {row['rate']:g}/s, {name}")


def loss_to_best(found: Found, who: str) -> str:
    """Why the default is slower than the best other configuration, where it clearly loses most; by the steps of both.

    Raises:
        KeyError: the run stored no steps.
    """
    rows = [row for row in found["rows"] if row["auto_over_best"]["mean"]["low"] > 1.0]
    if not rows:
        return f"nowhere clearly ({who})" if "parts" in found["rows"][0] else ""
    row = max(rows, key=lambda row: float(row["auto_over_best"]["mean"]["ratio"]))
    means = {config: figure["mean"] for config, figure in row["latency"].items() if config in row["parts"]}
    best = min((config for config in means if config != "auto"), key=lambda config: means[config])
    ratio = means[best] / means["auto"]
    return by_measured_steps(row["parts"], "auto", best, ratio, f"{who}, {row['rate']:g}/s, of {best}")


def by_measured_steps(parts: Mapping[str, Any], name: str, other: str, ratio: float, where: str) -> str:
    """A ratio of speeds as tokens of a request and step times steps per second, with the times of a step."""
    own, base = parts[name], parts[other]
    tokens, steps = request_tokens(own) / request_tokens(base), base["step_ms"] / own["step_ms"]
    rest = ""
    if tokens * steps > NOT_SLOWER * ratio:
        rest = f"; the rest, {ratio / tokens / steps:.2f}×, is waiting, prompts, or longer steps of more requests"
    return (
        f"{ratio:.2f}× ({where}): {tokens:.2f}× tokens of a request and step · {steps:.2f}× "
        f"steps per second = {tokens * steps:.2f}×, where a step takes {own['step_ms']:.1f} ms, {own['draft_ms']:.1f} "
        f"of these for drafts, instead of {base['step_ms']:.1f}{rest}"
    )


def request_tokens(parts: Mapping[str, float]) -> float:
    """Tokens of one request and step."""
    return parts["generation_tokens_per_step"] / parts["requests_per_step"]


def losses(results: Results) -> str:
    """The parts of the speed where a simulated goodput loses most; empty where no target was simulated."""
    cells = [results.sentence(source, partial(loss, who=who)) for who, source in SIMULATED.items()]
    cells = [cell for cell in cells if cell]
    if not cells:
        return ""
    return (
        "Where the simulated goodput loses most, the speed of its requests over those of the best other is "
        f"{'; '.join(cells)}. Steps without drafts count."
    )


def loss(found: Found, who: str) -> str:
    """The parts of the speed at the rate where goodput loses most to another length."""
    curves = simulated_curves(found)
    load = max(curves.latency, key=lambda load: curves.against_best(load)[0])
    best = curves.against_best(load)[1]
    return f"{by_steps(Runs(found), curves.adaptive, best, load)} ({who}, {load:g}/s, {best})"


def by_steps(runs: Runs, name: str, other: str, load: float) -> str:
    """Tokens per second of a request over those of another variant, as tokens of a step times steps per second.

    Tokens of a step are of one request, and steps without drafts count. Steps per second are those of a running
    request, which follow from its time per token.
    """
    own, others = runs.at(name, load), runs.at(other, load)
    speed = others["tpot"]["mean"] / own["tpot"]["mean"]
    tokens = step_tokens(own) / step_tokens(others)
    return f"{speed:.2f}× = {tokens:.2f}× tokens per step · {speed / tokens:.2f}× steps per second"


def step_tokens(run: Mapping[str, Any]) -> float:
    """Tokens of one request and step, with and without drafts."""
    return float(run["throughput"] * run["seconds"] / (run["rounds"] * run["mean_batch"]))


def served() -> str:
    """Return the most requests per second without drafts, by the scenarios' time models, and the requests of a run."""
    scenarios = {who: given() for who, given in SCENARIOS.items()}
    rates = each(f"{most_served(given):.1f} ({who})" for who, given in scenarios.items())
    running = each(dict.fromkeys(f"{given.max_num_seqs}" for given in scenarios.values()))
    counts = each(f"{given.requests}" for given in scenarios.values())
    return (
        f"Without drafts the targets serve at most {rates} requests/s (computed, {running} running). Above, latency "
        f"depends on the number of requests of a run, here {counts}."
    )


def each(words: Iterable[str]) -> str:
    """Return a list in words."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def most_served(given: Scenario) -> float:
    """Return the requests per second where as many requests run as may, each in the middle of its output."""
    (domain,) = given.domains
    prompt, output, running = domain.prompt.mean, domain.output.mean, given.max_num_seqs
    started = running / output  # requests per step
    context, tokens = running * (prompt + output / 2), running + started * prompt
    return started / (given.target.cost.built(FOLDER).seconds(context, tokens, running) + given.target.overhead)


def queues(results: Results) -> str:
    """How long requests of a simulated target wait without speculation; empty where no target was simulated."""
    cells = [results.sentence(source, partial(waits, who=who)) for who, source in SIMULATED.items()]
    cells = [cell for cell in cells if cell]
    if not cells:
        return ""
    return (
        "Without speculation the mean time to the first token at the lowest, the second highest and the highest rate "
        f"is {'; '.join(cells)}. Where the time is long, requests wait before they start, and latency is of a growing "
        "queue. The paper's figure 11 has such rates too (section 7.1.1); only its simulations keep below the service "
        "rate (section 7.2)."
    )


def waits(found: Found, who: str) -> str:
    """The mean time to the first token at three rates."""
    runs = Runs(found)
    rates = (runs.loads[0], *runs.loads[-2:])
    seconds = [f"{float(runs.at(BASE, rate)['ttft']['mean']):.2f} s at {rate:g}/s" for rate in rates]
    return f"{', '.join(seconds)} ({who})"


def regions(results: Results) -> str:
    """Whether larger simulated targets have fewer rates with a speedup, as in the paper; empty where one is missing."""
    found = {who: results.read(source) for who, source in SIMULATED.items()}
    ends = {who: simulated_curves(each).loses_from(LONG) for who, each in found.items() if each}
    if len(ends) < len(found):
        return ""
    cells = [
        f"{'lower' if ends[who] < ends[FIRST] else 'not lower'} for {who} on {GPUS[who]}"
        for who in ends
        if who != FIRST
    ]
    return (
        "By section 7.1.1, larger models have fewer rates with a speedup. Against "
        f"{FIRST} on {GPUS[FIRST]}, the rate from which {LONG.replace('=', ' = ')} is not faster is "
        f"{' and '.join(cells)}."
    )


def measured_curves(found: Found) -> Curves:
    """From ``benchmarks.load``."""
    return Curves(
        {row["rate"]: {name: at["mean"] for name, at in row["latency"].items()} for row in found["rows"]}, "auto"
    )


def simulated_curves(found: Found) -> Curves:
    """From a scenario whose adaptive variant is ``goodput``."""
    runs = Runs(found)
    return Curves({load: {name: runs.latency(name, load) for name in runs.variants} for load in runs.loads}, "goodput")


Pick = Callable[[Curves], str]


def shared(who: str = "") -> tuple[tuple[str, str, Pick], ...]:
    """What every sweep says of fixed lengths.

    Args:
        who: which of the paper's targets; the paper's rates are of figure 1, whose target is ``FIRST``.
    """
    first = who == FIRST
    larger = LARGER if who and not first else ""
    return (
        (
            f"Fastest fixed length at {'4/s' if first else 'the lowest rate'}",
            "k = 3 or 5 (figure 1)" if first else "k = 3 or 5, at low rates (section 7.1.1)",
            lambda curves: curves.fastest_fixed(4.0 if first else min(curves.latency)),
        ),
        ("Rate from which k = 5 is not faster", "above 12/s" if first else larger, lambda curves: curves.stops("k=5")),
        ("Rate from which k = 3 is not faster", "above 16/s" if first else larger, lambda curves: curves.stops("k=3")),
        ("Lowest speedup of each fixed length, and its rebound", REBOUND, Curves.rebounds),
    )


def crossings(results: Results, source: Source, who: str) -> list[Row]:
    """What a simulated sweep of rates says."""
    claims: tuple[tuple[str, str, Pick], ...] = (
        *shared(who),
        (
            "Speedup of the adaptive length at the lowest rate",
            LOW,
            lambda curves: f"{curves.speedup(curves.adaptive, min(curves.latency)):.2f}×",
        ),
        ("Speedup of the adaptive length over all rates", HIGH, Curves.span),
        (
            "Latency of the adaptive length over the best other's, at its worst rate",
            NEAR,
            Curves.worst_regret,
        ),
    )
    rows = [
        results.row(f"{what} ({who})", paper, source, lambda found, pick=pick: pick(simulated_curves(found)))
        for what, paper, pick in claims
    ]
    found = results.read(source)
    for load in sorted(simulated_curves(found).latency) if found else ():
        what = f"Speedups at {load:g}/s ({who})"
        rows.append(results.row(what, PLOT, source, lambda found, load=load: simulated_curves(found).row(load)))
    return rows


def measured(results: Results, source: Source, who: str) -> list[Row]:
    """What a measured sweep of rates says."""
    rows = [
        results.row(
            f"Speedup of the default by rate ({who})",
            f"{LOW} at low rates, {HIGH} at high rates",
            source,
            lambda found: over_base(found),
        ),
        results.row(
            f"Latency of the default over the best other's, median of turns ({who})",
            NEAR,
            source,
            lambda found: over_best(found, lambda row: row["paired"]),
        ),
        results.row(
            f"Latency of the default over the best other's, ratio of means ({who})",
            NEAR,
            source,
            lambda found: over_best(found, lambda row: row["auto_over_best"]["mean"]),
        ),
        results.row(f"Speedups of fixed lengths by rate ({who})", PLOT, source, lambda found: fixed(found)),
    ]
    rows += [
        results.row(f"{what} ({who})", paper, source, lambda found, pick=pick: pick(measured_curves(found)))
        for what, paper, pick in shared()
    ]
    return rows


def over_base(found: Found) -> str:
    """Speed over no speculation at each rate, with its interval; what is no clear gain is named."""
    cells = []
    for row in found["rows"]:
        given = row["auto_over_off"]["mean"]
        loss = ", a loss" if given["low"] > 1 else unclear(given["low"], given["high"])
        cells.append(
            f"{row['rate']:g}/s {1 / given['ratio']:.2f}× ({1 / given['high']:.2f} to {1 / given['low']:.2f}{loss})"
        )
    return ", ".join(cells)


def over_best(found: Found, pick: Callable[[Found], Found]) -> str:
    """Latency over the best other way's at each rate, with its interval; what is no clear gain is named."""
    cells = []
    for row in found["rows"]:
        given = pick(row)
        loss = ", a loss" if given["low"] > 1 else unclear(given["low"], given["high"])
        cells.append("{:g}/s {ratio:.2f} ({low:.2f} to {high:.2f}{}) of {best}".format(row["rate"], loss, **given))
    return ", ".join(cells)


def fixed(found: Found, rates: int | None = None) -> str:
    """Speedups of the fixed lengths, at the ``rates`` lowest rates."""
    curves = measured_curves(found)
    return "; ".join(
        f"{load:g}/s " + ", ".join(f"{name} {curves.speedup(name, load):.2f}×" for name in curves.fixed)
        for load in sorted(curves.latency)[:rates]
        if BASE in curves.latency[load]
    )
