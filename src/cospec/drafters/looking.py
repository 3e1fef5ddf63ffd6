"""What a drafter makes of tokens that are already known, without drafting (2510.20064).

Every drafter has to read the committed tokens when it catches up, so how likely it finds each of them costs little
more than the logits of those rows. That tells how well it would have drafted while it sat out, and how well it knows
the prompt before it has drafted anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from cospec import native
from cospec.batches import Segment, TokenBatch
from cospec.drafters.following import Follower
from cospec.draws import Floats
from cospec.protocols import Model
from cospec.sampling import softmax
from cospec.types import Budget, Context, Look

LOOKBACK = 32  # known tokens that a look is about, at most


def look(model: Model, follower: Follower, contexts: Seq[Context]) -> dict[str, Look]:
    """Feed the backlog and read the rows in front of the latest known tokens; the ids are the target's."""
    fitting = [context for context in contexts if follower.open(context, Budget(1, 1)) is not None]
    if not fitting:
        return {}
    segments: list[Segment] = []
    for context, fed in zip(fitting, follower.backlog(fitting).segments, strict=True):
        known = len(context.tokens)
        first = max(0, known - 1 - LOOKBACK)
        start = min(fed.start, first)
        segments.append(Segment(context.id, start, tuple(context.tokens[start:]), logits_from=first - start))
    logits = model.forward(TokenBatch(tuple(segments)))
    for context in fitting:
        follower.keep(context, (), ())
    # The row of each token is the one before it; the last row has none yet, and is asked about token 0.
    asked = [token for part in segments for token in (*part.tokens[part.logits_from + 1 :], 0)]
    found, row = {}, 0
    values = chances(logits, asked)
    for part in segments:
        count = len(part.tokens) - part.logits_from - 1
        found[part.id] = Look(float(values[row : row + count].sum()), count)
        row += count + 1
    return found


def chances(logits: Tensor, tokens: Seq[int]) -> Floats:
    """The probability of ``tokens [R]`` behind rows ``[R, V]``, at temperature 1; 0 for a row that is no numbers."""
    if reads_natively(logits):
        found = native.chance_rows(logits, tokens)
    else:
        found = softmax(logits, [1.0] * len(tokens))[np.arange(len(tokens)), list(tokens)]
    return np.nan_to_num(found, nan=0.0)


def reads_natively(logits: Tensor) -> bool:
    """Whether the native kernels for guesses and chances take these rows."""
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and native.available()
