"""The perplexity of a model on a text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput, words

_ID = "perplexity"


def perplexity(model: Model, tokens: Sequence[int], window: int = 512) -> float:
    """Return ``exp`` of the mean negative log-probability of ``tokens``, in consecutive windows.

    The first token of a window has no context and is not scored.

    Raises:
        InvalidInput: fewer than two tokens are given.
    """
    if len(tokens) < 2:
        raise InvalidInput("text", words(f"{len(tokens)} tokens long"), "at least two tokens")
    window = min(window, model.max_len)
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, window):
        part = tuple(tokens[start : start + window])
        if len(part) < 2:
            break
        if not model.pages.allocate(_ID, len(part)):
            raise InvalidInput("window", window, f"at most {model.pages.capacity} tokens, the KV cache")
        logits = model.forward(TokenBatch((SequenceSlice(_ID, 0, part),)))[:-1].double()
        model.pages.free(_ID)
        chosen = logits.gather(1, torch.tensor(part[1:])[:, None].to(logits.device))[:, 0]
        total += float((logits.logsumexp(1) - chosen).sum())
        count += len(part) - 1
    return math.exp(total / count)
