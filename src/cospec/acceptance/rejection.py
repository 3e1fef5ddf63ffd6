"""Verify each draft token separately: speculative sampling (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from typing import ClassVar

from cospec.acceptance.residual import residual
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Draft, TargetProbs, VerifyResult
from cospec.rng.random_streams import RandomStreams, StreamKind


class Rejection(AcceptanceMethod):
    """Accepts x with probability min(1, r(x) / q(x)); replaces a rejected token by a draw from norm(max(0, r - q)).

    A draft without q is a point mass: r(x) is its acceptance probability. Chains only.
    """

    name: ClassVar[str] = "rejection"
    exact: ClassVar[bool] = True
    needs_probs: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    stream_kind: ClassVar[StreamKind] = StreamKind.DRAFT
    native_id: ClassVar[int | None] = 1
    tensor_form: ClassVar[str | None] = "cospec.acceptance.tensor.methods:rejection"

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Test the chain from the front; stop at the first rejection."""
        probs, n = target.distribution, len(draft)
        uniforms = draws.uniforms(draft.base_len, n, StreamKind.ACCEPT)
        for node, token in enumerate(draft.tokens):
            drawn_with = 1.0 if draft.q is None else draft.q[node, token]
            # Strictly less: a token of probability zero is never accepted.
            if not uniforms[node] * drawn_with < probs[node, token]:
                recovered = draws.token(residual(probs[node], draft, node), draft.base_len + node, StreamKind.RECOVER)
                return VerifyResult(tuple(range(node)), recovered, bonus=False)
        return VerifyResult(tuple(range(n)), target.draw(n, draft.base_len + n, draws), bonus=True)
