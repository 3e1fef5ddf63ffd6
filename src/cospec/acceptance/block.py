"""Verify a chain as one block (Sun et al. 2024, 2403.10444).

A token that is likelier under the target than under the drafter passes its surplus to later tokens. The expected
accepted length is therefore at least that of ``rejection``, and no method for chains accepts more.
"""

from __future__ import annotations

from typing import ClassVar

from cospec.acceptance.residual import residual, surplus
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Draft, TargetProbs, VerifyResult
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind


class Block(AcceptanceMethod):
    """Accepts the longest prefix whose own test succeeds. A draft without q is a point mass. Chains only."""

    name: ClassVar[str] = "block"
    exact: ClassVar[bool] = True
    needs_probs: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    stream_kind: ClassVar[StreamKind] = StreamKind.DRAFT
    native_id: ClassVar[int | None] = 2
    tensor_form: ClassVar[str | None] = "cospec.acceptance.tensor.methods:block"

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Verify a chain; returns the accepted prefix and the next token.

        ``weight`` is the paper's p_i of the prefix, ``kept`` its tau: the last length whose draw succeeds.
        """
        probs, n = target.distribution, len(draft)
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
            return VerifyResult(tuple(range(n)), target.draw(n, position, draws), bonus=True)
        rest = residual(probs[kept], draft, kept, kept_weight)
        return VerifyResult(tuple(range(kept)), draws.token(rest, position, StreamKind.RECOVER), bonus=False)


def _chance(weight: float, probs: Floats, draft: Draft, length: int) -> float:
    """Return the paper's h_i, the acceptance probability of a prefix.

    For a full draft h_i is the weight. Otherwise it is the surplus after the prefix over the surplus plus 1 - weight.
    """
    if length == len(draft):
        return weight
    if weight == 0.0:
        return 0.0
    mass = float(surplus(probs[length], draft, length, weight).sum())
    return mass / (mass + (1.0 - weight)) if mass > 0.0 else 0.0  # a mass of rounding errors must not vanish in the sum
