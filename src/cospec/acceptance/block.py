"""Judge the chain as one block (Sun et al. 2024, 2403.10444).

A token that the law likes more than the drafter did lends its surplus to the tokens after it, so the expected accepted
length is never below that of ``rejection``, and no rule for chains does better.
"""

from __future__ import annotations

from typing import ClassVar

from cospec.acceptance.residual import residual, surplus
from cospec.core.plugins import AcceptanceMethod
from cospec.core.rng import Floats, RandomStreams, StreamKind
from cospec.core.types import Draft, TargetProbs, VerifyResult


class Block(AcceptanceMethod):
    """The longest prefix whose own test succeeds is kept. A draft without q is a point mass. Chains only."""

    name: ClassVar[str] = "block"
    exact: ClassVar[bool] = True
    needs_probs: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    stream_kind: ClassVar[StreamKind] = StreamKind.DRAFT
    native_id: ClassVar[int | None] = 2

    def verify(self, draft: Draft, scores: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """``weight`` is the paper's p_i of the prefix, ``kept`` its tau: the last length whose draw succeeds."""
        probs, n = scores.distribution, len(draft)
        uniforms = draws.uniforms(draft.base_len, n, StreamKind.ACCEPT)
        weight, kept, kept_weight = 1.0, 0, 1.0
        for length in range(1, n + 1):
            token = draft.tokens[length - 1]
            drawn_with = 1.0 if draft.q is None else float(draft.q[length - 1, token])
            weight = min(1.0, weight * float(probs[length - 1, token]) / drawn_with)
            if uniforms[length - 1] < _chance(weight, probs, draft, length):
                kept, kept_weight = length, weight
        position = draft.base_len + kept
        if kept == n:
            return VerifyResult(tuple(range(n)), scores.draw(n, position, draws), bonus=True)
        rest = residual(probs[kept], draft, kept, kept_weight)
        return VerifyResult(tuple(range(kept)), draws.token(rest, position, StreamKind.RECOVER), bonus=False)


def _chance(weight: float, probs: Floats, draft: Draft, length: int) -> float:
    """The paper's h_i: a full draft's weight, otherwise the surplus behind the prefix over that and what it lacks."""
    if length == len(draft):
        return weight
    if weight == 0.0:
        return 0.0
    mass = float(surplus(probs[length], draft, length, weight).sum())
    return mass / (mass + (1.0 - weight)) if mass > 0.0 else 0.0  # a mass of rounding must not vanish beside a 1
