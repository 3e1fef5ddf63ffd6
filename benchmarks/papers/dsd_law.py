"""DSD's adaptive verification on our models: what a bound on the divergence brings in speed, and costs in quality.

Speed is that of one request at a time at temperature 1. All bounds, exact verification on the same path and the
ordinary path (one target, a model drafter of as many tokens) take turns at each prompt, so ratios are of pairs. Quality
is the log-likelihood of reference answers under the relaxed distribution, and the target's perplexity of the texts that
were written. Intervals are over the texts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.common import DOMAINS, ROOT, mean_over_texts, prompts
from benchmarks.papers.common import How
from benchmarks.papers.sources import Found, Source
from cospec import LLM, SamplingParams
from cospec.core.interfaces import Model
from cospec.core.types import SpeculationParams
from cospec.ensemble.blends.adaptive import Adaptive, AdaptiveOptions
from cospec.ensemble.key_token_calibration import ReferenceRows, calibrate, read_answers, score
from cospec.models.loading import load_model
from cospec.outputs import RequestOutput

BOUNDS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
TOLERANCE = 0.02  # nats per token
WINDOW = 4
FIRST_ANSWER, LAST_ANSWER = 2, 10  # of each domain: held-out answers, after those of the fit
MODELS = ("zoo", "zoo:drafter")
EXACT_PATH = "one target"


def measure(per_domain: int = 8, tokens: int = 64, rounds: int = 4) -> Found:
    """Write with every bound in alternation, then measure the distribution on reference answers."""
    texts = [text for domain in DOMAINS for text in prompts(domain, per_domain)]
    relaxed = LLM(
        models=list(MODELS),
        ensemble={"method": "adaptive"},
        collaboration={"proposal": "naive", "gamma": WINDOW, "proposer": 1},
    )
    single = LLM(MODELS[0], {"method": "draft_model", "num_speculative_tokens": WINDOW, "policy": "fixed"})
    models = [load_model(name) for name in MODELS]
    validation = read_answers(models, answers(relaxed, 0, FIRST_ANSWER))
    held_out = [read_answers(models, [answer]) for answer in answers(relaxed, FIRST_ANSWER, LAST_ANSWER)]
    fits = {bound: calibrate(validation, bound, TOLERANCE).options for bound in BOUNDS}
    systems: dict[str, tuple[LLM, Mapping[str, Any] | None]] = {EXACT_PATH: (single, None)}
    for bound in BOUNDS:
        systems[f"{bound:g}"] = relaxed, {"method": "adaptive", **fits[bound].model_dump()}
    seconds, outputs = timed(systems, texts, tokens, rounds)
    rows, exact_length = [], acceptance(outputs[EXACT_PATH])["acceptance_length"]
    for bound in BOUNDS:
        own = outputs[f"{bound:g}"]
        figures = {
            **acceptance(own),
            "acceptance_length_ratio": acceptance(own)["acceptance_length"] / exact_length,
            "divergence": float(np.mean([output.divergence or 0.0 for output in own])),
            "speed": speed(seconds["0"], seconds[f"{bound:g}"]),
            "speed_over_one_target": speed(seconds[EXACT_PATH], seconds[f"{bound:g}"]),
            "loss": loss(held_out, fits[bound]),
            "perplexity": perplexity(models[0], own, len(texts)),
        }
        rows.append({"max_divergence": bound, "options": fits[bound].model_dump(), **figures})
    throughput = {name: tokens * len(texts) / float(np.median(runs.sum(-1))) for name, runs in seconds.items()}
    about = {"prompts": len(texts), "tokens": tokens, "window": WINDOW, "rounds": rounds, "tolerance": TOLERANCE}
    return {**about, "answer_tokens": sum(map(len, held_out)), "tokens_per_second": throughput, "rows": rows}


LAW = Source(
    "dsd_law",
    "python -m benchmarks.papers.dsd --run",
    How.MEASURED,
    measure,
    lambda found: isinstance(found["rows"][0]["perplexity"], dict),
)


def answers(llm: LLM, first: int, last: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and reference answers of every domain, in tokens."""
    found = []
    for domain in DOMAINS:
        lines = (ROOT / "examples" / "data" / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
        for row in map(json.loads, lines[len(lines) // 2 :][first:last]):
            found.append((llm.encode(row["turns"][0]), llm.encode(row["reference"])[:96]))
    return found


def timed(
    systems: Mapping[str, tuple[LLM, Mapping[str, Any] | None]], texts: Sequence[str], tokens: int, rounds: int
) -> tuple[dict[str, np.ndarray], dict[str, list[RequestOutput]]]:
    """Seconds ``[rounds, texts]`` and all outputs of each system; the systems take turns at every text."""
    seconds = {name: np.zeros((rounds, len(texts))) for name in systems}
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in systems}
    shuffled = np.random.default_rng(0)
    for round in range(-1, rounds):  # the first one warms up
        for place, text in enumerate(texts):
            seed = 1000 * (round + 1) + place
            params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=seed)
            for name in shuffled.permutation(list(systems)):
                llm, ensemble = systems[str(name)]
                started = time.perf_counter()
                found = llm.generate(text, params, SpeculationParams(acceptance_method="rejection"), ensemble)
                if round >= 0:
                    seconds[str(name)][round, place] = time.perf_counter() - started
                    outputs[str(name)] += found
    return seconds, outputs


def speed(base: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """How many times as fast: the ratio of total times, with a 95% interval over the texts."""
    before, after = base.sum(0), own.sum(0)
    draws = np.random.default_rng(0).integers(len(before), size=(2000, len(before)))
    low, high = np.quantile(before[draws].sum(-1) / after[draws].sum(-1), [0.025, 0.975])
    return {"ratio": float(before.sum() / after.sum()), "low": float(low), "high": float(high)}


def loss(answers: Sequence[ReferenceRows], options: AdaptiveOptions) -> dict[str, float]:
    """Nats per token by which reference answers are less likely than under the target, with a 95% interval."""
    blend, lost = Adaptive(options), list[float]()
    for answer in answers:
        total = 0.0
        for target, drafter, tokens in answer.parts():
            relaxed = torch.log_softmax(blend.combine([target, drafter][: len(blend.members)]).double(), -1)
            own = torch.log_softmax(target.double(), -1)
            total += float((own - relaxed).gather(-1, tokens[:, None]).sum())
        lost.append(total)
    return dict(zip(("mean", "low", "high"), mean_over_texts(lost, list(map(len, answers))), strict=True))


def perplexity(target: Model, outputs: Sequence[RequestOutput], texts: int) -> dict[str, float]:
    """The target's perplexity of what was written, with a 95% interval.

    Args:
        outputs: all outputs of the first round, then of the next; ``texts`` in each.
    """
    nats, counts = np.zeros(texts), np.zeros(texts, np.int64)
    for place, output in enumerate(outputs):
        prompt, written = output.prompt_token_ids, output.outputs[0].token_ids
        rows = score(target, [*prompt, *written], len(prompt))
        logs = torch.log_softmax(rows.double(), -1).gather(-1, torch.tensor(written)[:, None])
        nats[place % texts] -= float(logs.sum())
        counts[place % texts] += len(written)
    means = [float(np.exp(each)) for each in mean_over_texts(nats.tolist(), counts.tolist())]
    return dict(zip(("mean", "low", "high"), means, strict=True))


def acceptance(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    """Of all outputs together: 1 + accepted / drafts, and accepted / (accepted + rejections)."""
    stats = [output.stats for output in outputs]
    accepted, rejected, drafts = (
        sum(each) for each in zip(*((s.accepted, s.rejections, s.drafts) for s in stats), strict=True)
    )
    return {"acceptance_length": 1 + accepted / drafts, "acceptance": accepted / (accepted + rejected)}
