"""DSD's relaxation coefficient τ on our models: acceptance and quality of equation 8 with a fixed τ, and no key tokens.

The engine's blend `adaptive` has a bound in place of τ, so the texts here are reference answers, and nothing is
written. Acceptance is the mean of ``sum(min(p, q))``, the rate of rejection sampling. The mean total variation says
which bound of the blend departs as far from the target. Intervals are over the answers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.common import mean_over_texts
from benchmarks.papers.common import Section
from benchmarks.papers.dsd_law import MODELS, answers
from benchmarks.papers.sources import Found, Results, Source
from cospec import LLM
from cospec.ensemble.key_token_calibration import ReferenceRows, read_answers
from cospec.models.loading import load_model

TAUS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
FIGURES = {
    "acceptance": "acceptance rate",
    "divergence": "total variation from the target",
    "loss": "nats lost per token",
}
SMALL, RISING = "small loss of accuracy", "speed rises steadily"
PAPER = {0.1: SMALL, 0.2: SMALL, 0.3: SMALL, 0.4: RISING, 0.6: RISING, 0.8: "speed to about 2.6×"}


def measure(per_domain: int = 32) -> Found:
    """Figures of every τ, in the mean over the tokens of reference answers that no fit has seen."""
    held = answers(LLM(MODELS[0], {"method": "off"}), 2, 2 + per_domain)
    models = [load_model(name) for name in MODELS]
    texts = [read_answers(models, [answer]) for answer in held]
    rows = []
    for tau in TAUS:
        sums = [figures(text, tau) for text in texts]
        means = [mean_over_texts(each, list(map(len, texts))) for each in zip(*sums, strict=True)]
        named = [dict(zip(("value", "low", "high"), mean, strict=True)) for mean in means]
        rows.append({"tau": tau, **dict(zip(FIGURES, named, strict=True))})
    return {"answers": len(texts), "answer_tokens": sum(map(len, texts)), "rows": rows}


def figures(text: ReferenceRows, tau: float) -> tuple[float, float, float]:
    """Sums of acceptance, total variation from the target, and lost nats over the tokens of an answer."""
    target, drafter = (torch.log_softmax(rows.double(), -1) for rows in (text.target, text.drafter))
    relaxed = relax(target, drafter, tau)
    p, q, r = target.exp(), drafter.exp(), relaxed.exp()
    lost = (target - relaxed).gather(-1, text.tokens[:, None])
    return float(torch.minimum(r, q).sum()), float((r - p).abs().sum() / 2), float(lost.sum())


def relax(target: torch.Tensor, drafter: torch.Tensor, tau: float) -> torch.Tensor:
    """Equation 8, renormalized: log-probabilities ``[R, V]`` of ``P_t^(1 - τ) P_d^τ``."""
    return torch.log_softmax((1.0 - tau) * target + tau * drafter, -1)


TAU = Source("dsd_tau", "python -m benchmarks.papers.dsd --run dsd_tau", make=measure)


def section(results: Results) -> Section:
    """The ablation of τ."""

    def said(tau: float) -> Callable[[Found], str]:
        return lambda found: ", ".join(f"{words} {interval(at(found, tau)[name])}" for name, words in FIGURES.items())

    rows = tuple(results.row(f"τ = {tau:g}", PAPER.get(tau, ""), TAU, said(tau)) for tau in TAUS)
    return Section(
        "Ablation of τ from 0 to 0.8: equation 8 on reference answers",
        rows,
        "The paper describes speed and accuracy against τ in words. The engine has a bound in place of τ. So no text "
        "was written with a fixed τ, and no row is a speed. The rows are of the distribution itself at temperature 1, "
        f"without key tokens. {results.sentence(TAU, answered)} To find the bound that is like a τ, compare the total "
        "variations. Those of bounds are over texts that were written, those of τ over reference answers.",
    )


def answered(found: Found) -> str:
    """On how much text the figures are."""
    return f"They are means over {found['answers']} reference answers of {found['answer_tokens']:,} tokens in all."


def at(found: Found, tau: float) -> Found:
    """The figures of one τ.

    Raises:
        KeyError: τ was not measured.
    """
    for row in found["rows"]:
        if row["tau"] == tau:
            return dict(row)
    raise KeyError(tau)


def interval(given: Found) -> str:
    """A figure and its interval; rounding errors of 0 have no sign."""
    value, low, high = (f"{round(given[key], 3) + 0.0:.3f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
