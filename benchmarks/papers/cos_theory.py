"""CoS's theorems, compared with the exact count of calls and with measured speeds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.cos_theorems import acceptance_bound, alternate_factor
from benchmarks.papers.collaborations import COLLABORATIVE, Collaborations
from benchmarks.papers.common import Section, paragraph
from benchmarks.papers.cos_settings import SETTINGS
from benchmarks.papers.sources import Found, Results
from cospec.ensemble.speedup_model import ProposalProcess

Floats = NDArray[np.float64]
EQUAL, SMALL = 1.0, 0.125  # a proposer as dear as the scorer; one an eighth of it, such as 1B with 8B


def theorems(results: Results) -> Section:
    """Theorems 3.2 and 3.6, compared with drawn distributions and with the exact count of calls."""
    rows = []
    for c, gammas in ((EQUAL, (1, 2)), (SMALL, (1, 5))):
        for gamma in gammas:
            for alpha in (0.5, 0.7, 0.9):
                if (gamma, c) == (1, EQUAL):  # every cycle is the theorem's, so both sides would be one formula
                    continue
                turns = ProposalProcess((alpha, alpha), (gamma, 1)).factor((c, 1.0))
                rows.append(
                    results.computed(
                        f"Alternate, α = {alpha}, γ = {gamma}, c = {c:g}",
                        f"{alternate_factor(alpha, gamma, c):.3f}× (theorem 3.6)",
                        f"{turns:.3f}×",
                    )
                )
    rows.append(
        results.computed(
            "Least acceptance of a proposer of weight 0.5 in a weighted ensemble",
            f"{acceptance_bound((0.5, 0.5), 0):g} (theorem 3.2)",
            f"{least_acceptance(0.5):.3f} (least of 20,000 drawn pairs of distributions)",
        )
    )
    return Section(
        "Theorems 3.2 and 3.6: least acceptance, and expected speed over standard collaborative decoding",
        tuple(rows),
        "The paper's column holds the printed equations, computed; γ_p is 1. Ours counts the calls of all steps as a "
        "Markov chain. Theorem 3.1 has no rows: the count with one proposer is the theorem, as "
        "`tests/unit/ensemble/test_proposer_policy.py` shows. Theorem 3.6 is about one cycle, in which the first model "
        "proposes γ tokens. In other cycles the second model proposes one token; these cycles make the difference.",
    )


def least_acceptance(weight: float, draws: int = 20_000) -> float:
    """The least probability that ``weight * q + (1 - weight) * p`` accepts a proposal of ``q``, over drawn pairs."""
    q, p = drawn_pairs(draws)
    return float(np.minimum(q, weight * q + (1 - weight) * p).sum(-1).min())


def drawn_pairs(draws: int = 20_000) -> tuple[Floats, Floats]:
    """Pairs of distributions of five tokens ``[draws, 5]``, from nearly uniform to nearly disjoint."""
    chance = np.random.default_rng(0)
    sharpness = chance.uniform(0, 40, (draws, 1))
    logits = sharpness * chance.standard_normal((2, draws, 5))
    q, p = np.exp(logits - logits.max(-1, keepdims=True))
    return q / q.sum(-1, keepdims=True), p / p.sum(-1, keepdims=True)


def predictions(results: Results) -> Section:
    """Theorems 3.1 and 3.6 with the acceptance and the cost that were measured."""
    rows = [
        results.row(
            f"{kind}, {setting.name}, T = {temperature:g}",
            "",
            COLLABORATIVE,
            lambda found, s=setting, k=kind, w=theorem, t=temperature: Collaborations(found, s.name).theory(
                k, w, t, s.models
            ),
        )
        for setting in SETTINGS
        for kind, theorem in (("naive", "theorem 3.1"), ("alternate", "theorem 3.6"))
        for temperature in setting.temperatures
    ]
    return Section(
        "Theorems 3.1 and 3.6 with our acceptance and cost",
        tuple(rows),
        paragraph(
            "The speed is over standard decoding, as measured above.",
            "*Theorem*, *count* and *process* are computed with the engine's estimates of acceptance and with the "
            "measured cost. The theorem is 3.1 for `naive` and 3.6 for `alternate`. The count is that of all calls; "
            "for `naive` it is the theorem. *Process* is the count with the engine's fitted times of turns, of the "
            "same run; so it is no prediction by acceptance alone.",
            results.sentence(COLLABORATIVE, optimistic),
            "Theorem 3.6 gets the scorer's own α, where the paper has one α. The theorems are about two models. "
            "Theorem 3.6 is left out where the engine chose one proposer.",
        ),
    )


def optimistic(found: Found) -> str:
    """How often the process expects more than was measured, one request at a time."""
    pairs = [
        (row["theory"][f"{kind} process"], row["theory"][f"{kind} measured"])
        for setting in SETTINGS
        for kind in ("naive", "alternate")
        for row in found["settings"][setting.name]
        if "theory" in row and row["batch"] == 1 and row["temperature"] in setting.temperatures
    ]
    more = sum(process > measured for process, measured in pairs)
    return f"The process expects more than was measured in {more} of {len(pairs)} figures."
