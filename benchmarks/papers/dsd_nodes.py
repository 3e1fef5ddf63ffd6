"""DSD's equations, as printed and corrected, and the same situations simulated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.papers.sources import Found
from cospec.config import LinkConfig
from cospec.policies.goodput.draft_shapes import tree_tokens
from cospec.simulation.run import simulate
from cospec.simulation.scenario import (
    ArrivalConfig,
    DomainConfig,
    DrafterConfig,
    LatencyConfig,
    LengthConfig,
    Scenario,
    ScenarioVariant,
    TargetConfig,
)

NODES, RATIOS = (2, 4, 8, 16), (1.0, 3.0, 10.0)
WINDOW, ALPHA = 8, 0.764
KEPT = tree_tokens(ALPHA, (1,) * WINDOW)  # tokens a round: the paper's average length of 3.86 on HumanEval

LOCAL = LatencyConfig(slopes=(2e-4,), fixed=0.0198)  # t₀ = 20 ms for a token, whatever the context
STEP = LatencyConfig(slopes=(1e-5,), fixed=0.00099)  # of the drafter: 1 ms


@dataclass(frozen=True, slots=True)
class Links:
    """N nodes in a line, whose links take ``ratio`` times as long as the local time for a token."""

    nodes: int
    ratio: float

    @property
    def crossing(self) -> float:
        """``(N - 1) t₁`` in units of t₀."""
        return (self.nodes - 1) * self.ratio


def communication_reduction(links: Links, kept: float) -> float:
    """Equation 5."""
    return links.crossing * (kept - 1) / (kept * (1 + links.crossing))


def printed_speedup(links: Links, kept: float, window: int) -> float:
    """Equation 9 with ρ = k / (γ + 1)."""
    return (1 + links.crossing) / ((window + 1) / kept + links.crossing / kept)


def corrected_speedup(links: Links, kept: float, window: int) -> float:
    """What a pass over the window takes instead of γ + 1 passes, and the time of the draft."""
    local = LOCAL.built(Path())
    one, all_of_it = (local.seconds(0, tokens, 1) for tokens in (1, window + 1))
    draft = window * STEP.built(Path()).seconds(0, 1, 1)
    crossing = links.crossing * one
    return kept * (one + crossing) / (all_of_it + draft + crossing)


def scenario(links: Links, requests: int) -> Scenario:
    """One request at a time through a pipeline of as many stages as there are nodes."""
    t0 = LOCAL.built(Path()).seconds(0, 1, 1)
    return Scenario(
        requests=requests,
        max_num_seqs=1,
        target=TargetConfig(cost=LOCAL, stages=links.nodes, link=LinkConfig(delay=links.ratio * t0)),
        drafting=DrafterConfig(cost=STEP),
        domains=(DomainConfig(acceptance=ALPHA, prompt=LengthConfig(mean=8), output=LengthConfig(mean=256)),),
        arrivals=ArrivalConfig(kind="closed", concurrency=(1,)),
        variants=(
            ScenarioVariant(name="off", policy="off"),
            ScenarioVariant(name="window", policy="fixed", num_speculative_tokens=WINDOW),
            ScenarioVariant(name="goodput"),
        ),
    )


def assumed() -> str:
    """What the corrected and the drawn figures take besides nodes and links."""
    target, draft = LOCAL.built(Path()), STEP.built(Path())
    t0 = target.seconds(0, 1, 1)
    window, step = target.seconds(0, WINDOW + 1, 1) / t0, draft.seconds(0, 1, 1) / t0
    return (
        f"Assumed: t₀ is {1e3 * t0:.0f} ms, a pass over {WINDOW + 1} tokens takes {window:.2f} t₀, a draft token "
        f"{step:.2f} t₀, and a draft token is right with probability {ALPHA:g}, which gives the paper's {KEPT:.2f}. "
        "The paper does not say whether its length counts the target's token; read here as counting this token. "
        "Its k of section 2.1 does not count it; its ρ = k / (γ + 1) fits one that does. "
        "These fix the corrected and the drawn figures and the chosen lengths."
    )


def sweep(requests: int = 48) -> Found:
    """Tokens per second without drafts, with the window, and with lengths chosen by goodput, for every point."""
    rows = []
    for nodes, ratio in product(NODES, RATIOS):
        runs = {run["variant"]: run for run in simulate(scenario(Links(nodes, ratio), requests))["runs"]}
        speeds = {name: run["throughput"] for name, run in runs.items()}
        rows.append({"nodes": nodes, "ratio": ratio, **speeds, "length": runs["goodput"]["mean_k"]})
    return {"rows": rows, "alpha": ALPHA, "window": WINDOW}
