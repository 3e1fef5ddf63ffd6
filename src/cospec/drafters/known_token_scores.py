"""Score known tokens with a drafter, without drafting (2510.20064).

Every drafter reads committed tokens when it catches up, so scoring them only costs the rows' logits. The scores show
how well an unused drafter would have drafted, and how well a new drafter knows the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.rng import Floats
from cospec.core.sampling import likeliest, softmax
from cospec.core.types import DraftBudget, DraftContext
from cospec.drafters.draft_kv_cache import LOOKBACK, DraftKVCache
from cospec.native import library


def score_known_tokens(
    model: Model, kv_cache: DraftKVCache, contexts: Sequence[DraftContext]
) -> dict[str, TokenScores]:
    """Feed the backlog and score the latest known tokens; the ids are the target's."""
    fitting = [context for context in contexts if kv_cache.open(context, DraftBudget(1, 1)) is not None]
    if not fitting:
        return {}
    slices: list[SequenceSlice] = []
    for context, fed in zip(fitting, kv_cache.backlog(fitting).slices, strict=True):
        known = len(context.tokens)
        first = max(0, known - 1 - LOOKBACK)
        start = min(fed.start, first)
        slices.append(SequenceSlice(context.id, start, tuple(context.tokens[start:]), logits_from=first - start))
    logits = model.forward(TokenBatch(tuple(slices)))
    for context in fitting:
        kv_cache.keep(context, (), ())
    # A token's row is the row before it; the last row has no token yet, and scores token 0.
    asked = [token for part in slices for token in (*part.tokens[part.logits_from + 1 :], 0)]
    found, row = {}, 0
    values = token_probabilities(logits, asked)
    for part in slices:
        count = len(part.tokens) - part.logits_from - 1
        found[part.id] = TokenScores(float(values[row : row + count].sum()), count)
        row += count + 1
    return found


def take_last_rows(batch: TokenBatch, logits: Tensor) -> tuple[Tensor, list[int]]:
    """Return the last row of each slice ``[S, V]``, and how many known tokens were the likeliest after the rows before.

    Args:
        logits: ``[R, V]`` of the batch, over the ids of its tokens.
    """
    if len(logits) == len(batch.slices):
        return logits, [0] * len(batch.slices)
    lasts, hits, row = list[int](), list[int](), 0
    for part in batch.slices:
        known = part.tokens[part.logits_from + 1 :]
        best = likeliest(logits[row : row + len(known)])
        hits.append(sum([token == guess for token, guess in zip(known, best, strict=True)]))
        row += len(known) + 1
        lasts.append(row - 1)
    return torch.stack([logits[last] for last in lasts]), hits


def token_probabilities(logits: Tensor, tokens: Sequence[int]) -> Floats:
    """Return the probability of ``tokens [R]`` under rows ``[R, V]`` at temperature 1; 0 for a row that is not
    finite."""
    if reads_natively(logits):
        found = library.probability_rows(logits, tokens)
    else:
        found = softmax(logits, [1.0] * len(tokens))[np.arange(len(tokens)), list(tokens)]
    return np.nan_to_num(found, nan=0.0)


def reads_natively(logits: Tensor) -> bool:
    """Return whether the native kernels for candidates and scores can read these rows."""
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and library.available()
