"""SmartSpec: what the paper's text claims in passing, with a counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from benchmarks.headlines import decision_ms, decision_shares
from benchmarks.papers import smartspec_figures as figures
from benchmarks.papers.common import Row, paragraph
from benchmarks.papers.comparisons import EIGHT_TOKENS
from benchmarks.papers.confidences import CONFIDENCES, share
from benchmarks.papers.minions import DECISIONS, SLOPES
from benchmarks.papers.not_run import not_run
from benchmarks.papers.scenarios import FOLDER, Runs, scenario
from benchmarks.papers.smartspec_loads import longest, queuing
from benchmarks.papers.smartspec_rates import RATES, SIMULATED, simulated_curves, step_tokens
from benchmarks.papers.sources import Found, Results, Source
from cospec.drafters.medusa import level_paths
from cospec.simulation.scenario import Scenario

GRID, ZOO = scenario("smartspec-fig5"), scenario("zoo")
SERVED = Source(
    "serve_zoo",
    "cospec bench serve --model zoo --dataset-path examples/data/code.jsonl --dataset-path examples/data/math.jsonl "
    "--dataset-path examples/data/prose.jsonl --output-len 96 --num-prompts 150 --request-rate 2,5,10,15,20 "
    "--result-dir benchmarks/results --result-filename serve_zoo",
)
EQUATION_1_RATES = (1.0, 16.0, 32.0)  # requests per second
BATCHES = (1, 16, 64)
VERIFIED = 5  # tokens of a verification: four drafted ones and the last one
DOUBLED = (1, 2, 4, 8)  # tokens of a draft
HEADS = (3, 2, 3)  # tokens that figure 8's heads propose


def claims(results: Results) -> tuple[Row, ...]:
    """Return the rows, in the order of the paper's sections."""
    return (
        *verification(results),
        *outputs(results),
        *approximation(results),
        *batching(results),
        *queuing(results),
        *counts(results),
        *overheads(results),
        *shortest(results),
        service_rate(results),
    )


def verification(results: Results) -> tuple[Row, ...]:
    """Return what the verification of several tokens takes."""
    one, several = "only marginally slower", "higher batch latency (section 3.2)"
    rows = [
        results.row(
            f"Section 1: time of a forward of {VERIFIED} tokens over one of 1 token, {requests(count)}",
            one if count == 1 else several,
            figures.PROFILE,
            lambda found, count=count: several_over_one(found, count),
            f"{VERIFIED} tokens for each request, which has so many tokens of context",
        )
        for count in (1, 32)
    ]
    return (
        *rows,
        results.computed(
            "Section 1: the same of the 7B target of figure 5",
            f"1 request: {one}; batches: {several}",
            ", ".join(f"{modelled(count):.2f}× for {requests(count)}" for count in BATCHES),
            f"by its assumed times, {figures.CONTEXT} tokens of context",
        ),
    )


def outputs(results: Results) -> tuple[Row, ...]:
    """Return how many outputs with drafts are those without drafts."""
    sources = {
        "T = 1, 1 request": EIGHT_TOKENS,
        **{f"greedy, {requests(batch)}": source for batch, source in SLOPES.items()},
    }
    return tuple(
        results.row(
            f"Section 2.1: outputs equal to those without drafts, {words}",
            "exactly the same output as vanilla decoding",
            source,
            same_texts,
            "compared character by character" + ("; both draw with the same seeds" if source is EIGHT_TOKENS else ""),
        )
        for words, source in sources.items()
    )


def approximation(results: Results) -> tuple[Row, ...]:
    """Return the speedup by equation 1, and the one of the simulation that it approximates."""
    return tuple(
        results.row(
            f"Section 3.2: speedup of k = 3 at {rate:g}/s",
            results.sentence(RATES, lambda found, rate=rate: f"{by_equation_1(Runs(found), rate):.2f}× (equation 1)"),
            RATES,
            lambda found, rate=rate: f"{Runs(found).latency('off', rate) / Runs(found).latency('k=3', rate):.2f}×",
            "the 7B target of figure 11; equation 1 has the steps and batches of these runs, without the drafter, "
            "as in the paper, and without prompts and queues",
        )
        for rate in EQUATION_1_RATES
    )


def batching(results: Results) -> tuple[Row, ...]:
    """Return what a larger batch brings, and what a longer draft brings."""
    what = "Section 4.2: tokens per second"
    expected = ", ".join(f"k = {k}: {figures.printed_equation_8(figures.ALPHA, k):.2f}" for k in DOUBLED)
    return (
        results.row(
            "Section 4.2: tokens of a request and step, by length",
            f"twice the length does not give twice the tokens; at α = {figures.ALPHA} {expected} (equation 8)",
            CONFIDENCES,
            by_length,
            paragraph(
                "Chains of the generic drafter, temperature 0, prompts of all domains. The target's token counts.",
                results.sentence(CONFIDENCES, first_accepted),
            ),
        ),
        results.row(
            f"{what} without drafts, twice the batch",
            "twice the batch gives twice the tokens",
            GRID,
            lambda found: doubled(Runs(found)),
            "the paper counts tokens of a step; a larger batch also takes longer",
        ),
        results.row(
            f"{what} with k = 2, twice the batch or twice the length",
            "prefer batching over speculating",
            GRID,
            lambda found: batch_or_length(Runs(found)),
            "the 7B target of figure 5",
        ),
    )


def counts(results: Results) -> tuple[Row, ...]:
    """Return what figure 8 and algorithm 1 count."""
    leaves = sum(len(path) == len(HEADS) for path in level_paths(HEADS, max_nodes=1000))
    return (
        results.computed(
            f"Figure 8: possible continuations of widths {', '.join(map(str, HEADS))}",
            "18",
            str(leaves),
            "leaves of the tree that the drafter of heads builds",
        ),
        results.row(
            "Algorithm 1, line 4: tokens of a step of at most 32 requests, k = 3",
            results.sentence(GRID, lambda found: printed_tokens(Runs(found))),
            GRID,
            lambda found: f"{step_tokens(Runs(found).at('k=3', 32.0)) * Runs(found).at('k=3', 32.0)['mean_batch']:.0f}",
            "line 4 multiplies by the number of requests n twice, equation 9 once; n is the mean of these runs; "
            f"acceptance is drawn at {figures.ALPHA}, so equation 9 holds by construction",
        ),
    )


def overheads(results: Results) -> tuple[Row, ...]:
    """Return what decisions cost, and whether acceptance rates by request bring more."""
    found = results.read(figures.GRANULARITY)
    rows = [
        results.row(
            f"Section 5: speedup with acceptance rates by request, and with one for all, {load:g}/s",
            "similar gains",
            figures.GRANULARITY,
            lambda found, load=load: figures.granularities(Runs(found), load),
            "a third of the requests each with an acceptance of 0.5, 0.7 and 0.9, the 7B target of figure 11",
        )
        for load in (Runs(found).loads if found else (8.0,))
    ]
    return (
        *rows,
        results.row(
            "Section 5: time of goodput's decisions, mean of a step",
            "a very small overhead in comparison with a forward: O(nV) for n requests and lengths up to V",
            DECISIONS,
            decisions,
            paragraph(
                "Acceptance rates by request; steps are simulated, times are of the processor.",
                results.sentence(DECISIONS, single_decisions),
                "The paper decides at every step.",
            ),
        ),
        longest(results),
    )


def shortest(results: Results) -> tuple[Row, ...]:
    """Return the lengths of goodput at the highest rate."""
    return tuple(
        results.row(
            f"Section 7.1.1: mean length of goodput at the highest rate ({who})",
            "mirrors no tokens predicted",
            source,
            longest_and_shortest,
        )
        for who, source in SIMULATED.items()
    )


def service_rate(results: Results) -> Row:
    """Return the row of the simulator's error above the service rate."""
    simulated_zoo = results.read(ZOO)
    below = results.sentence(SERVED, lambda found: figures.unfitted_errors(found, simulated_zoo))
    return not_run(
        "Section 7.2: simulated latency above the service rate",
        "under-predicted",
        "No stored run is above the server's service rate."
        + (f" Below it the scenario that was not fitted is off by {below}." if below else ""),
    )


def requests(count: int) -> str:
    """Return a number of requests in words."""
    return f"{count} request{'s' if count > 1 else ''}"


def several_over_one(found: Found, count: int) -> str:
    """Return the ratio at each length of the context, for ``count`` requests.

    Raises:
        KeyError: no context has both forwards.
    """
    seconds = {
        (sample["context"] // count, sample["tokens"] // count): float(sample["seconds"])
        for sample in found["profiles"][0]["samples"]
        if sample["sequences"] == count
    }
    cells = [
        f"{seconds[context, VERIFIED] / seconds[context, 1]:.2f}× after {context}"
        for context, tokens in sorted(seconds)
        if tokens == VERIFIED and (context, 1) in seconds
    ]
    if not cells:
        raise KeyError("samples")
    return ", ".join(cells)


def modelled(count: int) -> float:
    """Return the same of the scenario's time model."""
    cost = Scenario.read(FOLDER / "smartspec-fig5.yaml").target.cost.built(FOLDER)
    several, one = (cost.seconds(figures.CONTEXT * count, tokens * count, count) for tokens in (VERIFIED, 1))
    return several / one


def same_texts(found: Found) -> str:
    """Return the number of equal outputs of each way to draft.

    Raises:
        KeyError: the run has no share of equal outputs.
    """
    runs = [run for run in found["runs"] if run["label"] != "off"]
    return ", ".join(f"{run['label']} {run['same_text'] * run['completed']:.0f} of {run['completed']}" for run in runs)


def by_equation_1(runs: Runs, rate: float) -> float:
    """Return batch latency times steps without drafts over that with k = 3."""
    cost = Scenario.read(FOLDER / "smartspec-fig11.yaml").target.cost.built(FOLDER)

    def latency(run: Mapping[str, Any]) -> float:
        batch = float(run["mean_batch"])
        context = (figures.CONTEXT + figures.CONTEXT / 2) * batch  # inputs and half of the outputs
        return cost.seconds(context, batch * (1.0 + run["mean_k"]), batch) / step_tokens(run)

    return latency(runs.at("off", rate)) / latency(runs.at("k=3", rate))


def by_length(found: Found) -> str:
    """Return the measured tokens of a step at lengths that double, the target's token included, with intervals."""
    cells = []
    for length in DOUBLED:
        tokens = {key: 1 + length * value for key, value in share(found, "all", 0.0, length).items()}
        cells.append("k = {}: {value:.2f} ({low:.2f} to {high:.2f})".format(length, **tokens))
    return ", ".join(cells)


def first_accepted(found: Found) -> str:
    """Return how often the first draft token is accepted, to compare with equation 8's α."""
    return f"The first draft token is accepted with {share(found, 'all', 0.0, 1)['value']:.2f}."


def doubled(runs: Runs) -> str:
    """Return tokens per second at batches that double, and their ratios."""
    loads = [load for load in runs.loads if load / 2 in runs.loads or load * 2 in runs.loads]
    speeds = [runs.throughput("off", load) for load in loads]
    ratios = ", ".join(f"{later / former:.2f}×" for former, later in pairwise(speeds))
    named = " → ".join(f"{speed:.0f}" for speed in speeds)
    return f"{named} at batch {', '.join(f'{load:g}' for load in loads)} ({ratios})"


def batch_or_length(runs: Runs) -> str:
    """Return the ratio of throughputs with twice the batch, and with twice the length."""
    cells = []
    for load in runs.loads:
        own = runs.throughput("k=2", load)
        batch = f"batch {runs.throughput('k=2', 2 * load) / own:.2f}×, " if 2 * load in runs.loads else ""
        cells.append(f"from batch {load:g}: {batch}length {runs.throughput('k=4', load) / own:.2f}×")
    return "; ".join(cells)


def printed_tokens(runs: Runs) -> str:
    """Return the tokens of a step by line 4 of algorithm 1 as the paper has it, and by equation 9."""
    count = float(runs.at("k=3", 32.0)["mean_batch"])
    tokens = figures.printed_equation_8(figures.ALPHA, 3)
    return f"{count * tokens * count:,.0f} (line 4), {count * tokens:.0f} (equation 9)"


def decisions(found: Found) -> str:
    """Return microseconds of planning and learning, and their share of a step, by the number of requests.

    Raises:
        KeyError: goodput was not measured.
    """
    cells = [
        f"{row['plan_us'] + row['observe_us']:.1f} µs for {requests(row['batch'])} ({row['share']:.1%} of a step)"
        for row in found["rows"]
        if row["policy"] == "goodput"
    ]
    if not cells:
        raise KeyError("goodput")
    return ", ".join(cells)


def single_decisions(found: Found) -> str:
    """Return how often goodput decides again, and what one decision takes, by the number of requests.

    Raises:
        KeyError: goodput was not measured.
    """
    rows = [row for row in found["rows"] if row["policy"] == "goodput"]
    if not rows:
        raise KeyError("goodput")
    cells = [
        f"{decision_ms(row):.2f} ms for {requests(row['batch'])} ({decision_ms(row) / row['round_ms']:.0%} of a step)"
        for row in rows
    ]
    return f"A new decision is made in {decision_shares(rows)} of the steps. A single one takes {', '.join(cells)}."


def longest_and_shortest(found: Found) -> str:
    """Return goodput's mean length at the lowest and at the highest rate, and its speedup at the latter."""
    runs, curves = Runs(found), simulated_curves(found)
    low, high = min(runs.loads), max(runs.loads)
    lengths = [f"{runs.at(curves.adaptive, load)['mean_k']:.2f} at {load:g}/s" for load in (high, low)]
    return f"{lengths[0]}, where the speedup is {curves.speedup(curves.adaptive, high):.2f}×; {lengths[1]}"
