"""What SmartSpec's page computes: best lengths, expected tokens, and how simulated runs are put into words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.papers.common import How
from benchmarks.papers.scenarios import FOLDER, Runs, described, simulated
from benchmarks.papers.sources import Found, Source
from cospec.drafters.model import ModelDrafter
from cospec.models.loading import load_model
from cospec.policies.goodput.draft_shapes import chains, tree_tokens
from cospec.policies.goodput.length_problem import LengthProblem
from cospec.policies.goodput.step_costs import LengthInputs, StepCosts
from cospec.policies.latency.step import LatencyModels, StepLatency
from cospec.profiling.fit_errors import Profile
from cospec.profiling.measure import MeasurementGrid, measure_forwards, measure_steps
from cospec.simulation.scenario import DomainConfig, DrafterConfig, LengthConfig, Scenario, ScenarioVariant

KINDS = (0.5, 0.7, 0.9)  # acceptance of the kinds of requests
ALPHA, CONTEXT, LONGEST = 0.7, 128, 10
MISTRAL_CONTEXT = 1.2e-7  # seconds of a cached token with 8 heads of keys, by the rule of ``large_targets``
LOOKUP_SHARE, LOOKUP_LENGTH = 0.35, 3  # accepted over proposed tokens: the paper measured 0.3 to 0.4 for Mistral


def best_length(batch: int, alpha: float = ALPHA) -> int:
    """The single length with the most expected tokens per second, by the goodput policy's own code."""
    scenario = Scenario.read(FOLDER / "smartspec-fig5.yaml")
    costs = LatencyModels(scenario.target.cost.built(FOLDER), scenario.drafting.cost.built(FOLDER))
    problem = LengthProblem([chains(LONGEST)], StepCosts(StepLatency(costs)))
    situation = LengthInputs(batch, CONTEXT, backlog=None, others=0, room=1 << 20)
    _, budgets = problem.uniform(alpha, situation)
    return budgets[0].depth


def best_fixed(runs: Runs, load: float) -> str:
    """The fastest fixed length in closed-loop runs."""
    fixed = [name for name in runs.variants if name.startswith("k=")]
    best = max(fixed, key=lambda name: runs.throughput(name, load))
    others = {"off": runs.throughput("off", load), "adaptive": runs.throughput("goodput", load)}
    words = ", ".join(f"{name} {value:.0f}" for name, value in others.items())
    sizes = [float(runs.at(name, load)["mean_batch"]) for name in (best, "goodput")]
    if runs.throughput("goodput", load) < 0.97 * runs.throughput(best, load):
        words += f"; mean batches of adaptive {sizes[1]:.0f}, of {best} {sizes[0]:.0f}"
    return f"{best}: {runs.throughput(best, load):.0f} ({words})"


def held_out(found: Found, place: int) -> str:
    """The error of one profile of ``cospec profile``."""
    errors = found["profiles"][place]["held_out"]
    return f"{errors['median_error']:.1%} (90th percentile {errors['p90_error']:.1%})"


def unfitted_error(served: Found, simulated_runs: Found | None, load: float) -> str:
    """Mean latency of the server at a rate, and how far the simulation is from it.

    Raises:
        KeyError: that rate was not served, was more than the server can do, or was not simulated.
    """
    if simulated_runs is None:
        raise KeyError("zoo")
    for run in served["runs"]:
        if run["request_rate"] == load and not run["saturated"]:
            measured = run["mean_e2el_ms"] / 1e3
            return f"{measured:.3f} s, {Runs(simulated_runs).latency('auto', load) / measured - 1:+.1%}"
    raise KeyError(load)


def fitted_error(found: Found) -> str:
    """Least and most error of the simulated mean latency of each way of serving, and of the 99th percentile."""
    errors: dict[str, list[float]] = {}
    for row in found["rows"]:
        errors.setdefault(row["config"], []).append(row["error"]["mean"])
    rates = sorted({row["rate"] for row in found["rows"]})
    cells = "; ".join(f"{name} {min(each):+.1%} to {max(each):+.1%}" for name, each in errors.items())
    tails = [abs(row["error"]["p99"]) for row in found["rows"]]
    return (
        f"{cells}; 99th percentile {found['median']['error']['p99']:.1%} (median), at most {max(tails):.1%}; at "
        f"{rates[0]:g} to {rates[-1]:g}/s"
    )


def unfitted_errors(served: Found, simulated_runs: Found | None) -> str:
    """The range of these errors over all rates.

    Raises:
        KeyError: no rate was served and simulated.
    """
    if simulated_runs is None:
        raise KeyError("zoo")
    errors = [
        Runs(simulated_runs).latency("auto", run["request_rate"]) / (run["mean_e2el_ms"] / 1e3) - 1
        for run in served["runs"]
        if not run["saturated"]
    ]
    if not errors:
        raise KeyError("rates")
    return f"{min(errors):+.0%} to {max(errors):+.0%}"


def granularities(runs: Runs, load: float) -> str:
    """Speed over no speculation with acceptance rates by request, and with one rate for all."""
    base = runs.latency("off", load)
    cells = {"by request": "goodput", "one for all": "one rate"}
    return ", ".join(f"{words} {base / runs.latency(name, load):.2f}×" for words, name in cells.items())


def profile(seconds: float = 15.0) -> Found:
    """What ``cospec profile`` measures: forwards of the target, steps of the drafter."""
    target, drafter = load_model("zoo"), load_model("zoo:drafter")
    steps = MeasurementGrid(tokens=(1, 2, 4, 8), chunks=())
    profiles = (
        Profile.of("zoo", measure_forwards(target, MeasurementGrid(), seconds)),
        Profile.of("zoo:drafter, drafting", measure_steps(ModelDrafter(drafter), drafter.vocab_size, steps, seconds)),
    )
    return {"profiles": [each.to_json() for each in profiles]}


def predictors(runs: Runs, level: str) -> str:
    """Speedups of random lengths, goodput and the oracle at one acceptance."""
    base = runs.latency("off")
    found = [(kind, runs.latency(f"{kind} {level}".strip())) for kind in ("random", "goodput", "oracle")]
    return ", ".join(f"{kind} {base / seconds:.2f}×" for kind, seconds in found)


def listed(runs: Runs, load: float, figure: Callable[[Mapping[str, Any]], str]) -> str:
    """A figure of every variant at a load."""
    return ", ".join(f"{name} {figure(runs.at(name, load))}" for name in runs.variants)


def mean_latency(run: Mapping[str, Any]) -> str:
    """In seconds."""
    return f"{run['latency']['mean']:.2f}"


def batch_tokens(run: Mapping[str, Any]) -> str:
    """Tokens of one forward of the target, prompts included."""
    return f"{run['mean_batched_tokens']:.0f}"


def per_sequence(run: Mapping[str, Any]) -> str:
    """Tokens scored for one sequence in a round: its last token and its draft."""
    return f"{1.0 + run['mean_k']:.2f}"


def headed(row: Mapping[str, Any]) -> str:
    """One kind of draft of ``benchmarks.heads``."""
    length = "{:.2f} ({:.2f} to {:.2f})".format(*row["acceptance_length"])
    return f"{length}, {row['nodes']:.1f} nodes, {row['tokens_per_s']:.0f} tokens/s"


def printed_equation_8(alpha: float, length: int) -> float:
    """Equation 8 as the paper has it: expected tokens of a chain of ``length``, the target's token included."""
    return (1.0 - alpha ** (length + 1)) / (1.0 - alpha)


def printed_equation_10(alpha: float, widths: Sequence[int]) -> float:
    """Equation 10 as the paper has it."""
    total, reached = 0.0, 1.0
    for place, width in enumerate(widths, 1):
        reached *= 1.0 - (1.0 - alpha) ** width
        following = alpha if place < len(widths) else 0.0
        total += (place + 1) * (1.0 - following) * reached
    return total


def drawn_tokens(chance: np.random.Generator, alpha: float, widths: Sequence[int], draws: int = 200_000) -> float:
    """Mean tokens of a level tree whose tokens are each right with ``alpha``, drawn."""
    right = np.stack([(chance.random((draws, width)) < alpha).any(axis=1) for width in widths], axis=1)
    return 1.0 + float(np.cumprod(right, axis=1).sum(axis=1).mean())


def drawn_rates(chance: np.random.Generator, alpha: float, length: int, draws: int = 200_000) -> str:
    """Accepted over proposed tokens, and over accepted and rejected tokens, of drawn drafts."""
    right = chance.random((draws, length)) < alpha
    accepted = np.cumprod(right, axis=1).sum(axis=1)
    rejected = (accepted < length).sum()
    first, second = accepted.sum() / (draws * length), accepted.sum() / (accepted.sum() + rejected)
    return f"{first:.2f} accepted / proposed, {second:.2f} accepted / (accepted + rejected)"


def accepted_over_proposed(alpha: float, length: int) -> float:
    """What accepted / proposed tends to."""
    return (tree_tokens(alpha, (1,) * length) - 1.0) / length


def rate_of(share: float, length: int) -> float:
    """The acceptance rate of each token at which ``share`` of the proposed tokens are accepted."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_over_proposed(middle, length) < share else (low, middle)
    return round(low, 3)


def large_scenario() -> Scenario:
    """Figure 11 with the target and the drafter of CoSine's scenarios: 70B on four A100, and 4 ms a draft token."""
    given, large = (Scenario.read(FOLDER / f"{name}.yaml") for name in ("smartspec-fig11", "cosine-cost"))
    arrivals = given.arrivals.model_copy(update={"rates": (0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0)})
    drafting = DrafterConfig(cost=large.drafting.cost)
    target = given.target.model_copy(update={"cost": large.target.cost, "overhead": large.target.overhead})
    return given.model_copy(update={"target": target, "drafting": drafting, "arrivals": arrivals, "requests": 200})


def lookup_scenario() -> Scenario:
    """Figure 12: the machine of figure 11, a smaller KV cache, drafts by lookup, long prompts and short outputs."""
    scenario = Scenario.read(FOLDER / "smartspec-fig11.yaml")
    summary = DomainConfig(
        name="summary",
        acceptance=rate_of(LOOKUP_SHARE, LOOKUP_LENGTH),
        prompt=LengthConfig(mean=768),
        output=LengthConfig(mean=96),
    )
    rates = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
    arrivals = scenario.arrivals.model_copy(update={"rates": rates})
    cost = scenario.target.cost.model_copy(update={"context": MISTRAL_CONTEXT})
    target = scenario.target.model_copy(update={"cost": cost})
    changed = {"drafting": DrafterConfig(kind="lookup"), "domains": (summary,), "arrivals": arrivals, "requests": 200}
    changed |= {"target": target}
    return scenario.model_copy(update=changed)


def granularity_scenario() -> Scenario:
    """Figure 11's machine with three kinds of requests, and goodput with a rate by request or one for all."""
    scenario = Scenario.read(FOLDER / "smartspec-fig11.yaml")
    (chat,) = scenario.domains
    domains = tuple(chat.model_copy(update={"name": f"chat {rate}", "acceptance": rate}) for rate in KINDS)
    variants = (
        ScenarioVariant(name="off", policy="off"),
        ScenarioVariant(name="goodput"),
        ScenarioVariant(name="one rate", policy_options={"per_sequence": False}),
    )
    arrivals = scenario.arrivals.model_copy(update={"rates": (1.0, 8.0, 16.0, 24.0)})
    return scenario.model_copy(update={"domains": domains, "arrivals": arrivals, "variants": variants})


GRANULARITY = Source(
    "simulations/smartspec-granularity",
    "python -m benchmarks.papers.smartspec --run",
    How.SIMULATED,
    lambda: simulated(granularity_scenario()),
    lambda found: bool(found["scenario"] == described(granularity_scenario())),
)
LOOKUP = Source(
    "simulations/smartspec-fig12",
    "python -m benchmarks.papers.smartspec --run",
    How.SIMULATED,
    lambda: simulated(lookup_scenario()),
    lambda found: bool(found["scenario"] == described(lookup_scenario())),
)
LARGE = Source(
    "simulations/smartspec-fig11-70b",
    "python -m benchmarks.papers.smartspec --run",
    How.SIMULATED,
    lambda: simulated(large_scenario()),
    lambda found: bool(found["scenario"] == described(large_scenario())),
)
PROFILE = Source("profile", "cospec profile zoo --drafter zoo:drafter --seconds 15", How.MEASURED, profile)
