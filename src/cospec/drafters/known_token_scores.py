"""Score known tokens with a drafter, without drafting (2510.20064).

The scores show how well an unused drafter would have drafted, and how well a new drafter knows the prompt. A drafter
reads a short backlog into its KV cache, as it would to draft. Of a long backlog the drafter reads only the end, and
keeps nothing, because most drafters that score do not draft next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.sampling import likeliest, softmax
from cospec.core.types import DraftBudget, DraftContext
from cospec.drafters.draft_kv_cache import LOOKBACK, DraftKVCache
from cospec.native import library
from cospec.rng.random_streams import Floats

WINDOW = LOOKBACK + 1 + 16  # tokens that are read of a long backlog; the first 16 only give context
LONG_BACKLOG = 2 * WINDOW  # from here on windows save tokens, even if one of two drafters then drafts and reads all


def score_known_tokens(
    model: Model, kv_cache: DraftKVCache, contexts: Sequence[DraftContext]
) -> dict[str, TokenScores]:
    """Score the latest known tokens, at most ``LOOKBACK``; the ids are the target's."""
    windows: dict[str, SequenceSlice] = {}
    fitting: list[DraftContext] = []
    for context in contexts:
        if kv_cache.backlog_len(context.id, len(context.tokens)) > LONG_BACKLOG:
            window = _window(model, context)
            if window is not None:
                windows[context.id] = window
        elif kv_cache.open(context, DraftBudget(1, 1)) is not None:
            fitting.append(context)
    slices: list[SequenceSlice] = []
    for context, fed in zip(fitting, kv_cache.backlog(fitting).slices, strict=True):
        known = len(context.tokens)
        first = max(0, known - 1 - LOOKBACK)
        start = min(fed.start, first)
        slices.append(SequenceSlice(context.id, start, tuple(context.tokens[start:]), logits_from=first - start))
    slices += windows.values()
    if not slices:
        return {}
    try:
        logits = model.forward(TokenBatch(tuple(slices)))
    finally:
        model.free([window.id for window in windows.values()])
    for context in fitting:
        kv_cache.keep(context, (), ())
    return _scores([*[context.id for context in fitting], *windows], slices, logits)


def _window(model: Model, context: DraftContext) -> SequenceSlice | None:
    """Return the end of the known tokens as a sequence of its own, with room in the KV cache; None without room."""
    id, tokens = f"{context.id} scored", tuple(context.tokens[-WINDOW:])
    model.pages.open_sequence(id, ())
    if len(tokens) > model.max_len or not model.pages.allocate(id, len(tokens)):
        model.free([id])
        return None
    return SequenceSlice(id, 0, tokens, logits_from=len(tokens) - 1 - LOOKBACK)


def _scores(ids: Sequence[str], slices: Sequence[SequenceSlice], logits: Tensor) -> dict[str, TokenScores]:
    # A token's row is the row before it; the last row has no token yet, and scores token 0.
    asked = [token for part in slices for token in (*part.tokens[part.logits_from + 1 :], 0)]
    found, row = {}, 0
    values = token_probabilities(logits, asked)
    for id, part in zip(ids, slices, strict=True):
        count = len(part.tokens) - part.logits_from - 1
        found[id] = TokenScores(float(values[row : row + count].sum()), count)
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
