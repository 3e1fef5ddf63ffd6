"""SmartSpec: what the paper claims in passing on queues, memory, a low acceptance and the longest draft."""

from __future__ import annotations

from benchmarks.papers import smartspec_figures as figures
from benchmarks.papers.common import Row
from benchmarks.papers.curves import BASE
from benchmarks.papers.not_run import not_run
from benchmarks.papers.scenarios import FOLDER, Runs, scenario
from benchmarks.papers.smartspec_rates import FIRST, SCENARIOS, SIMULATED, most_served, simulated_curves
from benchmarks.papers.sources import Found, Results
from cospec.policies.goodput.draft_shapes import tree_tokens
from cospec.policies.goodput.shape_menus import LONGEST_CHAIN
from cospec.policies.policy_build_context import DEFAULT_MAX_LENGTH
from cospec.simulation.scenario import Scenario

ORACLE = scenario("smartspec-fig14")
RANDOM = "random"  # figure 14's variants of random lengths begin with this word
SLOWER = "increases latency"
RATES_BELOW = (0.1, 0.3)  # acceptance
LENGTHS = (1, 3, 5)


def queuing(results: Results) -> tuple[Row, ...]:
    """Return how long requests wait for their first token at the highest rate."""
    return tuple(
        results.row(
            f"Section 4.2: mean time to the first token at the highest rate ({who})",
            "optimizing goodput helps decrease queuing delays at high request rates",
            source,
            first_tokens,
            "the time includes the prefill; a request waits for the end of a step before its prefill"
            + results.sentence(source, lambda found, who=who: below_service_rate(Runs(found), who)),
        )
        for who, source in SIMULATED.items()
    )


def below_service_rate(runs: Runs, who: str) -> str:
    """Return words after a highest rate that a target can serve without drafts; else empty."""
    return "; the rate is below the service rate" if max(runs.loads) < most_served(SCENARIOS[who]()) else ""


def first_tokens(found: Found) -> str:
    """Return the mean time to the first token without drafts and with goodput."""
    runs, adaptive = Runs(found), simulated_curves(found).adaptive
    rate = max(runs.loads)
    pair = [runs.at(name, rate) for name in (BASE, adaptive)]
    seconds = [f"{float(run['ttft']['mean']):.2f} s" for run in pair]
    steps = " and ".join(f"{1e3 * run['seconds'] / run['rounds']:.0f}" for run in pair)
    return f"{' without drafts, '.join(seconds)} with goodput, at {rate:g}/s; a step takes {steps} ms"


def swapping() -> Row:
    """Return the row of the setting that runs out of memory."""
    given = SCENARIOS[FIRST]()
    (domain,) = given.domains
    tokens = domain.prompt.mean + domain.output.mean
    return not_run(
        "Figure 1: a setting that runs out of GPU memory and swaps",
        "a red cross",
        f"Our runs cannot show this. {given.max_num_seqs} requests of {tokens:g} tokens need "
        f"{given.max_num_seqs * tokens:,.0f} of {given.kv_tokens:,} tokens of the KV cache.",
    )


def low_acceptance(results: Results) -> tuple[Row, ...]:
    """Return what drafts bring where few of their tokens are accepted."""
    return (
        results.row(
            "Abstract: speedup of random lengths at a low acceptance",
            SLOWER,
            ORACLE,
            random_lengths,
            "the lowest acceptance of figure 14",
        ),
        *(
            results.computed(
                f"Abstract: speedup of fixed lengths at an acceptance of {alpha:g}, 1 request",
                SLOWER,
                ", ".join(f"k = {length}: {speedup(alpha, length):.2f}×" for length in LENGTHS),
                f"equation 8 and the assumed times of the 7B target of figure 5, {figures.CONTEXT} tokens of context; "
                "fixed lengths were not run at this acceptance",
            )
            for alpha in RATES_BELOW
        ),
    )


def random_lengths(found: Found) -> str:
    """Return the speedup of random lengths at the lowest acceptance.

    Raises:
        KeyError: there are no random lengths.
    """
    runs = Runs(found)
    levels = [name.removeprefix(RANDOM).strip() for name in runs.variants if name.startswith(RANDOM)]
    if not levels:
        raise KeyError(RANDOM)
    level = min(levels, key=float)
    gain = runs.latency(BASE) / runs.latency(f"{RANDOM} {level}")
    return f"{gain:.2f}× at an acceptance of {level}"


def speedup(alpha: float, length: int) -> float:
    """Return the time of a token without drafts over the time with drafts of ``length``, one request at a time."""
    given = Scenario.read(FOLDER / "smartspec-fig5.yaml")
    target, draft = (part.cost.built(FOLDER) for part in (given.target, given.drafting))
    alone, checked = (
        target.seconds(figures.CONTEXT, tokens, 1.0) + given.target.overhead for tokens in (1.0, 1.0 + length)
    )
    drafted = draft.seconds(figures.CONTEXT, 1.0, 1.0, length)
    return alone * tree_tokens(alpha, (1,) * length) / (checked + drafted)


def longest(results: Results) -> Row:
    """Return the row of the engine's limit of lengths."""
    return results.computed(
        "Section 5: the longest proposed length",
        "typically less than 10",
        f"{DEFAULT_MAX_LENGTH}, at most {LONGEST_CHAIN}",
        "the engine's limit, if not configured; it doubles where a request takes all of it",
    )
