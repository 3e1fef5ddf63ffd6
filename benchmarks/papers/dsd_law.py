"""DSD's adaptive law on our models: what τ brings in acceptance, and what it costs in distance from the target."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.common import DOMAINS, prompts
from benchmarks.papers.sources import Found
from cospec import LLM, SamplingParams
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.types import Speculation
from cospec.ensemble.blends.adaptive import Adaptive, AdaptiveOptions
from cospec.models.loading import load_model
from cospec.outputs import RequestOutput

TAUS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8)
WINDOW = 4
MODELS = ("zoo", "zoo:drafter")


def measure(per_domain: int = 8, tokens: int = 48) -> Found:
    """Write with every τ at temperature 1, then measure the law on what was written."""
    texts = [text for domain in DOMAINS for text in prompts(domain, per_domain)]
    llm = LLM(
        models=list(MODELS),
        ensemble={"blend": "adaptive", "tau": 0.2},
        collaboration={"proposal": "naive", "gamma": WINDOW, "proposer": 1},
    )
    models = [load_model(name) for name in MODELS]
    params = [SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=n) for n in range(len(texts))]
    rows = []
    for tau in TAUS:
        outputs = llm.generate(
            texts, params, Speculation(acceptance_method="rejection"), {"blend": "adaptive", "tau": tau}
        )
        rows.append({"tau": tau, **acceptance(outputs), "divergence": divergence(models, outputs, tau)})
    return {"prompts": len(texts), "tokens": tokens, "window": WINDOW, "rows": rows}


def acceptance(outputs: list[RequestOutput]) -> dict[str, float]:
    """Of all outputs together: 1 + accepted / drafts, and accepted / (accepted + rejections)."""
    stats = [output.stats for output in outputs]
    accepted, rejected, drafts = (
        sum(getattr(each, name) for each in stats) for name in ("accepted", "rejections", "drafts")
    )
    return {"acceptance_length": 1 + accepted / drafts, "acceptance": accepted / (accepted + rejected)}


def divergence(models: list[Model], outputs: list[RequestOutput], tau: float) -> float:
    """Mean total variation between the law and the target's own distribution at the positions that were written."""
    blend, total, count = Adaptive(AdaptiveOptions(tau=tau)), 0.0, 0
    for output in outputs:
        written = output.outputs[0].token_ids
        logits = [rows(model, [*output.prompt_token_ids, *written], len(output.prompt_token_ids)) for model in models]
        distribution, own = (torch.softmax(each.double(), -1) for each in (blend.combine(logits), logits[0]))
        total += float((distribution - own).abs().sum()) / 2
        count += len(own)
    return total / count


def rows(model: Model, tokens: list[int], first: int) -> Tensor:
    """Logits of every position from ``first`` on."""
    model.pages.match_prefix("text", ())
    model.pages.allocate("text", len(tokens))
    try:
        return model.forward(TokenBatch((SequenceSlice("text", 0, tuple(tokens[:-1]), logits_from=first - 1),))).clone()
    finally:
        model.free(["text"])
