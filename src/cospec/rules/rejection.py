"""Judge each draft token by itself: speculative sampling (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from typing import ClassVar

from cospec.draws import Draws, Purpose
from cospec.plugins import Rule
from cospec.rules.residual import residual
from cospec.types import Draft, Scores, Verdict


class Rejection(Rule):
    """Accept x with probability min(1, r(x) / q(x)); replace a rejected one by a draw from norm(max(0, r - q)).

    A draft without q is a point mass: r(x) is the acceptance probability. Spec section 3; chains only.
    """

    name: ClassVar[str] = "rejection"
    exact: ClassVar[bool] = True
    reads_law: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    noise: ClassVar[Purpose] = Purpose.DRAFT
    native_id: ClassVar[int | None] = 1

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Test the chain from the front; stop at the first rejection."""
        law, n = scores.distribution, len(draft)
        uniforms = draws.uniforms(draft.base_len, n, Purpose.ACCEPT)
        for node, token in enumerate(draft.tokens):
            drawn_with = 1.0 if draft.q is None else draft.q[node, token]
            # Strictly less: a token of probability zero is never kept, whatever the draw.
            if not uniforms[node] * drawn_with < law[node, token]:
                recovered = draws.token(residual(law[node], draft, node), draft.base_len + node, Purpose.RECOVER)
                return Verdict(tuple(range(node)), recovered, bonus=False)
        return Verdict(tuple(range(n)), scores.draw(n, draft.base_len + n, draws), bonus=True)
