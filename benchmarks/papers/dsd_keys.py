"""DSD's conditions of key tokens (equation 7) on our models: acceptance and quality with each of them, and with all.

The figures are of the distribution itself on reference answers that no fit has seen; nothing is written. Thresholds are
the engine's defaults, because the paper prints none. Intervals are over the answers.
"""

from __future__ import annotations

from benchmarks.common import mean_over_texts
from benchmarks.papers.common import Section
from benchmarks.papers.dsd_law import MODELS, answers
from benchmarks.papers.dsd_tau import FIGURES, answered, interval
from benchmarks.papers.sources import Found, Results, Source
from cospec import LLM
from cospec.ensemble.blends.adaptive import AdaptiveOptions
from cospec.ensemble.key_token_calibration import LAMBDA1, LAMBDA2, LAMBDA3, qualities, read_answers
from cospec.models.loading import load_model

BOUND = 0.2
OFF = {"lambda1": LAMBDA1[-1], "lambda2": LAMBDA2[-1], "lambda3": LAMBDA3[-1]}
CONDITIONS: dict[str, tuple[str, ...]] = {
    "no condition": (),
    "H_d / H_t > λ₁": ("lambda1",),
    "|P_t − P_d| > λ₂": ("lambda2",),
    "NormMatch < λ₃": ("lambda3",),
    "all three": tuple(OFF),
}


def measure(per_domain: int = 32) -> Found:
    """Figures with each condition, in the mean over the tokens of reference answers."""
    held = answers(LLM(MODELS[0], {"method": "off"}), 2, 2 + per_domain)
    models = [load_model(name) for name in MODELS]
    texts = [read_answers(models, [answer]) for answer in held]
    usual = AdaptiveOptions(max_divergence=BOUND)
    given = [
        usual.model_copy(update={name: end for name, end in OFF.items() if name not in kept})
        for kept in CONDITIONS.values()
    ]
    found, lengths = [qualities(text, given) for text in texts], list(map(len, texts))
    rows = []
    for place, words in enumerate(CONDITIONS):
        row: dict[str, object] = {"conditions": words}
        for name in FIGURES:
            sums = [getattr(each[place], name) * length for each, length in zip(found, lengths, strict=True)]
            row[name] = dict(zip(("value", "low", "high"), mean_over_texts(sums, lengths), strict=True))
        rows.append(row)
    thresholds = [getattr(usual, name) for name in OFF]
    return {
        "bound": BOUND,
        "thresholds": thresholds,
        "answers": len(texts),
        "answer_tokens": sum(lengths),
        "rows": rows,
    }


KEYS = Source("dsd_keys", "python -m benchmarks.papers.dsd --run dsd_keys", make=measure)


def section(results: Results) -> Section:
    """The conditions one by one."""
    rows = tuple(
        results.row(
            f"Key tokens: {words}",
            "",
            KEYS,
            lambda found, place=place: said(found["rows"][place]),
        )
        for place, words in enumerate(CONDITIONS)
    )
    return Section(
        f"Equation 7: conditions of key tokens at a bound of {BOUND:g}, on reference answers",
        rows,
        "The paper's H_d and H_t are cross entropies of a token under the draft and the target. Ours are the entropies "
        "of the two distributions. NormMatch is the overlap of these; the paper's example is that of their top-k "
        "supports. So the first and the third condition make all tokens of a position key tokens. "
        "The rows are of the distribution itself at temperature 1, and no row is a speed. "
        f"{results.sentence(KEYS, answered)} {results.sentence(KEYS, thresholds)}",
    )


def said(row: Found) -> str:
    """All figures of a row."""
    return ", ".join(f"{words} {interval(row[name])}" for name, words in FIGURES.items())


def thresholds(found: Found) -> str:
    """The three thresholds."""
    first, second, third = found["thresholds"]
    return f"λ₁, λ₂ and λ₃ are the engine's defaults {first:g}, {second:g} and {third:g}, since the paper prints none."
