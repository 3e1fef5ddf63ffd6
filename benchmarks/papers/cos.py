"""CoS: several models that write one text. ``python -m benchmarks.papers.cos [--run]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.cos_theorems import acceptance_bound, alternate_factor, naive_factor
from benchmarks.papers.collaborations import COLLABORATIVE, QUALITY, SWEEPS, Collaborations, quality
from benchmarks.papers.command import main
from benchmarks.papers.common import Page, Section
from benchmarks.papers.not_run import remaining
from benchmarks.papers.sources import Found, Results, Source
from cospec.ensemble.speedup_model import ProposalProcess

SOURCES: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """Models and a blend of ``benchmarks.collaborative``, and what the paper says of the like.

    Attributes:
        paper: by method; two where the paper has a figure for each temperature.
    """

    name: str
    title: str
    models: int
    temperatures: tuple[float, ...]
    paper: Mapping[str, str | tuple[str, str]]
    text: str = ""


SETTINGS = (
    Setting(
        "weighted-two",
        "Tables 2 and 7: weighted ensemble of two models of one size",
        2,
        (1.0,),
        {
            "parallel": "0.62 to 0.79×",
            "plain": "1.06 to 1.27× (SD)",
            "naive": "1.32 to 1.46× (without alternation)",
            "alternate": "1.34 to 1.62×",
            "outside": "",
        },
        "Ours are two models of 22 M parameters, each with weight 0.5. *Parallel* asks both models at once. In "
        "*plain*, the paper's SD, the last member drafts. In *outside* a small drafter that is no member drafts. "
        "*Naive* has one proposer, *alternate* is CoS. Intervals are over prompts.",
    ),
    Setting(
        "weighted-three",
        "Table 2: weighted ensemble of three models",
        3,
        (1.0,),
        {
            "parallel": "0.54 to 0.82×",
            "plain": "0.92 to 0.98× (SD)",
            "naive": "",
            "alternate": "1.27 to 1.85×",
            "outside": "",
        },
        "Each model has a third of the weight. The methods are those of two models.",
    ),
    Setting(
        "weighted-small",
        "Figure 8: a small share of a small model",
        2,
        (1.0,),
        {"parallel": "", "plain": "", "naive": "", "alternate": ""},
        "The weights are 0.7 for the large model and 0.3 for the small one, so λ is 0.3.",
    ),
    Setting(
        "contrastive",
        "Tables 3 and 8: contrastive decoding of a large and a small model",
        2,
        (0.0, 1.0),
        {
            "parallel": ("0.40 to 0.59×", "0.39 to 0.56×"),
            "plain": ("0.93 to 2.04× (SD)", "0.94 to 1.55× (SD)"),
            "naive": ("1.18 to 1.98× (without alternation)", "0.89 to 1.41× (without alternation)"),
            "alternate": ("1.26 to 2.23×", "1.11 to 1.65×"),
        },
        "Ours are the target and the drafter of the package, with μ = 0.1. The paper's ranges are of its Llama pairs.",
    ),
)
# tokens per second of tables 5 and 6: standard, SD, CoS
SPEEDS = {
    ("weighted-two", 1.0): (
        "20.5 to 22.6 (7B), 47.0 to 49.6 (3B), 76.6 to 82.6 (1.5B)",
        "23.9 to 28.7 (7B), 50.7 to 56.1 (3B), 84.3 to 91.7 (1.5B)",
        "28.8 to 35.7 (7B), 64.8 to 80.4 (3B), 103 to 129 (1.5B)",
    ),
    ("weighted-three", 1.0): ("53.7 to 57.0", "51.1 to 55.1", "68.3 to 105"),
    ("contrastive", 0.0): (
        "38.1 to 39.4 (Llama-3), 46.2 to 49.7 (Llama-2), 19.6 to 23.5 (OPT)",
        "59.2 to 80.3 (Llama-3), 43.0 to 78.0 (Llama-2), 23.2 to 28.8 (OPT)",
        "61.3 to 87.8 (Llama-3), 60.1 to 83.5 (Llama-2), 61.4 to 78.5 (OPT)",
    ),
    ("contrastive", 1.0): (
        "38.1 to 39.0 (Llama-3), 43.5 to 47.5 (Llama-2), 19.5 to 23.9 (OPT)",
        "40.8 to 60.4 (Llama-3), 44.5 to 58.4 (Llama-2), 35.2 to 41.1 (OPT)",
        "45.0 to 64.3 (Llama-3), 48.3 to 65.1 (Llama-2), 36.4 to 42.1 (OPT)",
    ),
}
EQUAL, SMALL = 1.0, 0.125  # a proposer as dear as the scorer; one an eighth of it, such as 1B with 8B


def page(results: Results) -> Page:
    """The theorems, and the tables of speedups."""
    sections = (theorems(results), *tables(results), remaining("cos"))
    return Page("cos", "CoS", sections, results.here)


def theorems(results: Results) -> Section:
    """Theorems 3.1, 3.2 and 3.6, compared with the exact count of calls."""
    rows = []
    for c, gammas in ((EQUAL, (1, 2)), (SMALL, (1, 5))):
        for gamma in gammas:
            for alpha in (0.5, 0.7, 0.9):
                where = f"α = {alpha}, γ = {gamma}, c = {c:g}"
                naive = ProposalProcess((alpha, alpha), (gamma, 1), alternate=False).factor((c, 1.0))
                turns = ProposalProcess((alpha, alpha), (gamma, 1)).factor((c, 1.0))
                rows += [
                    results.computed(
                        f"Naive, {where}",
                        f"{naive_factor(alpha, gamma, c):.3f}× (theorem 3.1)",
                        f"{naive:.3f}×",
                        "check of the count",
                    ),
                    results.computed(
                        f"Alternate, {where}",
                        f"{alternate_factor(alpha, gamma, c):.3f}× (theorem 3.6)",
                        f"{turns:.3f}×",
                    ),
                ]
    rows.append(
        results.computed(
            "Least acceptance of a proposer of weight 0.5 in a weighted ensemble",
            f"{acceptance_bound((0.5, 0.5), 0):g} (theorem 3.2)",
            f"{least_acceptance(0.5):.3f} (least of 20,000 drawn pairs of distributions)",
        )
    )
    return Section(
        "Theorems 3.1 and 3.6: expected speed over standard collaborative decoding",
        tuple(rows),
        "The paper's column holds the printed equations, computed; γ_p is 1. Ours counts the calls of all steps as a "
        "Markov chain. Theorem 3.1 and the count have the same assumptions, so these rows check "
        "the count. Theorem 3.6 is about one cycle, in which the cheap model proposes. In other cycles the expensive "
        "model proposes; these cycles make the difference.",
    )


def least_acceptance(weight: float, draws: int = 20_000) -> float:
    """The least probability that ``weight * q + (1 - weight) * p`` accepts a proposal of ``q``, over drawn pairs.

    Pairs are from nearly uniform to nearly disjoint.
    """
    chance = np.random.default_rng(0)
    sharpness = chance.uniform(0, 40, (draws, 1))
    logits = sharpness * chance.standard_normal((2, draws, 5))
    q, p = np.exp(logits - logits.max(-1, keepdims=True))
    q, p = q / q.sum(-1, keepdims=True), p / p.sum(-1, keepdims=True)
    return float(np.minimum(q, weight * q + (1 - weight) * p).sum(-1).min())


def tables(results: Results) -> tuple[Section, ...]:
    """Tables 2, 3, 7 and 8, and figures 4 to 6: the paper's ranges over its models and tasks."""
    return (
        *(table(results, setting) for setting in SETTINGS),
        raw(results),
        predictions(results),
        sweeps(results),
        qualities(results),
    )


def table(results: Results, setting: Setting) -> Section:
    """Every method over standard collaborative decoding, one request at a time and eight."""
    rows = []
    for place, temperature in enumerate(setting.temperatures):
        for method, said in setting.paper.items():
            rows.append(
                results.row(
                    f"{method}, T = {temperature:g}",
                    said if isinstance(said, str) else said[place],
                    COLLABORATIVE,
                    lambda found, m=method, t=temperature: read(found, setting).over_standard(m, t, 1),
                )
            )
        rows.append(
            results.row(
                f"alternate, T = {temperature:g}, 8 requests at once",
                "",
                COLLABORATIVE,
                lambda found, t=temperature: read(found, setting).over_standard("alternate", t, 8),
            )
        )
        rows.append(
            results.row(
                f"Calls of all models for a token, alternate, T = {temperature:g}",
                "at most 2, for γ = 1" if setting.models == 2 else "",
                COLLABORATIVE,
                lambda found, t=temperature: read(found, setting).calls("alternate", t),
                "with the lengths that the engine chose",
            )
        )
    return Section(f"{setting.title}, speed over standard collaborative decoding", tuple(rows), setting.text)


def predictions(results: Results) -> Section:
    """Theorems 3.1 and 3.6 with the acceptance and the cost that were measured."""
    rows = [
        results.row(
            f"{kind}, {setting.name}, T = {temperature:g}",
            "",
            COLLABORATIVE,
            lambda found, s=setting, k=kind, w=theorem, t=temperature: read(found, s).theory(k, w, t, s.models),
        )
        for setting in SETTINGS
        for kind, theorem in (("naive", "theorem 3.1"), ("alternate", "theorem 3.6"))
        for temperature in setting.temperatures
    ]
    return Section(
        "Theorems 3.1 and 3.6 with our acceptance and cost",
        tuple(rows),
        "The speed is over standard decoding, as measured above. *Theorem* and *process* are computed from the "
        "measured acceptance and cost: theorem 3.1 for `naive` and theorem 3.6 for `alternate`, and the count of "
        "calls. Theorem 3.6 gets the scorer's own α, where the paper has one α. The theorems are about two models.",
    )


def sweeps(results: Results) -> Section:
    """Figures 4 to 6."""
    papers = {
        ("weighted-two", "lambda"): "at least 1.5× for every λ (figure 4)",
        ("weighted-small", "lambda"): "rises with λ (figure 8)",
        ("contrastive", "mu"): "above 1× for every μ, falls as μ rises (figure 5)",
        ("weighted-two", "gamma"): "flat, since both models cost the same (figure 6a)",
        ("contrastive", "gamma"): "rises, then falls (figures 6b and 6c, two model pairs)",
    }
    rows = [
        results.row(
            f"{value}, {name}",
            paper,
            SWEEPS,
            lambda found, name=name, value=value: Collaborations(found, name).sweep(value),
        )
        for (name, value), paper in papers.items()
    ]
    return Section(
        "Figures 4 to 6: speed against λ, μ and γ",
        tuple(rows),
        "Alternating proposals over standard decoding: 9 prompts of three domains, one request at a time, T = 1, and "
        "T = 0 for contrastive decoding. The engine chooses the lengths for λ and μ. For γ the last model proposes γ "
        "tokens and the other model one. The paper has γ from 1 to 5.",
    )


def raw(results: Results) -> Section:
    """Tables 5 and 6: tokens per second."""
    rows = [
        results.row(
            f"{name}, {method}, T = {temperature:g}",
            paper,
            COLLABORATIVE,
            lambda found, n=name, m=method, t=temperature: Collaborations(found, n).raw(m, t),
        )
        for (name, temperature), papers in SPEEDS.items()
        for method, paper in zip(("standard", "plain", "alternate"), papers, strict=True)
    ]
    return Section(
        "Tables 5 and 6: tokens per second",
        tuple(rows),
        "The paper's speeds are of other models on other machines; compare the rows of a setting. *Plain* is the "
        "paper's SD. The pairs are Llama-Vicuna (7B), Qwen-3b and Qwen-1.5b; Llama-3, Llama-2 and OPT.",
    )


def qualities(results: Results) -> Section:
    """Figure 8: quality and speed."""
    rows = [
        results.row(
            f"Nats per token of {domain} answers by {option}, {words}",
            "accuracy falls slowly as λ rises" if (models, option) == ("small", "lambda") else "",
            QUALITY,
            lambda found, m=models, o=option, d=domain: quality(found, m, o, d),
        )
        for models, words in (("small", "a small second model"), ("equal", "a second model of the same size"))
        for option in ("lambda", "mu")
        for domain in ("code", "math", "prose")
    ]
    return Section(
        "Figure 8: quality and speed",
        tuple(rows),
        "Nats per token of held-out reference answers; lower is better. λ is the weight of the second model, μ the "
        "share that contrastive decoding subtracts. The speeds at λ from 0.1 to 0.9 and μ from 0.1 to 0.5 stand above, "
        "for a small second model. The paper shows accuracy on four tasks, and only for λ.",
    )


def read(found: Found, setting: Setting) -> Collaborations:
    """The rows of a setting."""
    return Collaborations(found, setting.name)


if __name__ == "__main__":
    main("cos")
