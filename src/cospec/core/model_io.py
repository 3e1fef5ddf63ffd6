"""What a model is asked to compute: packed, ragged batches of tokens, and drafts as one call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cospec.core.rng import Floats, Stream


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence in a packed batch: known tokens first, then the nodes of a draft.

    Attributes:
        start: tokens of the sequence already in the model's cache; the segment is written after them.
        tokens: ``[n]``.
        parents: ``[N]`` of the draft nodes, the last ``N`` of ``tokens``; empty for none.
        logits_from: rows ``logits_from .. n-1`` get logits.
    """

    id: str
    start: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    logits_from: int = 0

    @property
    def known(self) -> int:
        """How many of ``tokens`` are not draft nodes."""
        return len(self.tokens) - len(self.parents)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A packed, ragged batch for one forward pass. Logits come back concatenated in segment order."""

    segments: tuple[SequenceSlice, ...]


@dataclass(frozen=True, slots=True)
class RolloutParams:
    """How the tokens of one sequence are chosen in a rollout.

    Attributes:
        temperature: 0 takes the likeliest token.
        stream: what the first token is drawn with; the position in it goes up by one with each token.
        depth: tokens to choose.
        confident: whether the confidences are wanted; where tokens are not drawn they cost a look at all logits.
        logits: whether the caller needs the logits, besides the chosen tokens.
    """

    temperature: float
    stream: Stream
    depth: int
    confident: bool = False
    logits: bool = False


@dataclass(frozen=True, slots=True)
class RolloutOutput:
    """What a rollout chose.

    Attributes:
        tokens: ``[S][depth]`` of the longest; -1 where the logits were no numbers or nothing was wanted any more, and
            nothing after it counts.
        q: ``[S, depth, V]``, what they were drawn from, rows of drawn tokens only; None when none was drawn.
        confidence: ``[S, depth]``, the largest probability at each step, at temperature 1 where the likeliest token is
            taken; None when no pick asks for it.
        logits: float32 ``[depth, S, V]``, what each token was chosen by; None when no pick asks for them.
    """

    tokens: list[list[int]]
    q: Floats | None
    confidence: Floats | None = None
    logits: NDArray[np.float32] | None = None
