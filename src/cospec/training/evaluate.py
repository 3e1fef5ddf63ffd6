"""Measures a family: loss on held-out text, agreement of drafter and target, samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from cospec.training.corpus import Corpus, end_token
from cospec.training.generate import PromptSampler, Writer

Documents = list[tuple[list[int], list[int]]]  # prompts, each with its continuation


@dataclass(frozen=True)
class TextLoss:
    """Cross-entropy of held-out text of one domain, over ``tokens`` tokens."""

    nats_per_token: float
    bits_per_character: float
    tokens: int


@torch.no_grad()
def heldout_loss(
    model: LlamaForCausalLM, tokenizer: Tokenizer, stream: np.ndarray, length: int, limit: int = 40_000
) -> TextLoss:
    """Return the loss of the first ``limit`` tokens of ``stream``, in consecutive windows of ``length``.

    The first token of a window has no context, so the loss is slightly above the loss of one long context.
    """
    stream = stream[: limit + 1]
    length = min(length, len(stream) - 1)
    count = (len(stream) - 1) // length
    total = 0.0
    for i in range(count):
        window = torch.from_numpy(stream[i * length : (i + 1) * length + 1].astype(np.int64))[None].to(model.device)
        logits = model(input_ids=window[:, :-1]).logits[0].float()
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    scored = stream[1 : count * length + 1]
    end = end_token(tokenizer)
    characters = len(tokenizer.decode([int(token) for token in scored if token != end]))
    return TextLoss(total / len(scored), total / math.log(2) / max(1, characters), len(scored))


def heldout_losses(
    model: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus, length: int, limit: int = 40_000
) -> dict[str, TextLoss]:
    """Return ``heldout_loss`` per domain."""
    return {name: heldout_loss(model, tokenizer, stream, length, limit) for name, stream in corpus.heldout.items()}


@dataclass(frozen=True)
class Agreement:
    """The agreement of a model with a target on the target's text.

    Attributes:
        top1: share of positions with the same likeliest token: the acceptance rate of greedy decoding.
        overlap: mean of ``sum(min(p, q))`` at temperature 1: the acceptance rate of rejection sampling, and one minus
            the total variation.
        tokens: measured positions.
    """

    top1: float
    overlap: float
    tokens: int


@torch.no_grad()
def agreements(
    models: Mapping[str, LlamaForCausalLM], target: LlamaForCausalLM, documents: Documents
) -> dict[str, Agreement]:
    """Compare each model with ``target`` on ``documents``, each a prompt and the target's continuation."""
    sums = {name: [0.0, 0.0] for name in models}
    count = 0
    for prompt, answer in documents:
        if not answer:
            continue
        ids = torch.tensor([prompt + answer], device=target.device)[:, :-1]
        p = target(input_ids=ids).logits[0, len(prompt) - 1 :].float()
        probs, likeliest = p.softmax(-1), p.argmax(-1)
        count += len(p)
        for name, model in models.items():
            q = model(input_ids=ids).logits[0, len(prompt) - 1 :].float()
            sums[name][0] += float((q.argmax(-1) == likeliest).sum())
            sums[name][1] += float(torch.minimum(probs, q.softmax(-1)).sum())
    return {
        name: Agreement(same / max(1, count), overlap / max(1, count), count) for name, (same, overlap) in sums.items()
    }


def heldout_answers(
    writer: Writer, corpus: Corpus, tokenizer: Tokenizer, temperature: float, rows: int = 24
) -> dict[str, Documents]:
    """Return ``rows`` held-out prompts per domain, each with a continuation of 128 tokens by ``writer``."""
    result = {}
    for name in corpus.heldout:
        prompts = PromptSampler.build(corpus.heldout, {name: 1.0}, tokenizer).draw(rows, (0, 4))
        result[name] = list(zip(prompts, writer(prompts, 128, temperature, 0), strict=True))
    return result
