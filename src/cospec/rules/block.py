"""Judge the chain as one block (Sun et al. 2024, 2403.10444).

A token that the law likes more than the drafter did lends its surplus to the tokens after it, so the expected accepted
length is never below that of ``rejection``, and no rule for chains does better.
"""

from __future__ import annotations

from typing import ClassVar

from cospec.draws import Draws, Floats, Purpose
from cospec.plugins import Rule
from cospec.rules.residual import residual, surplus
from cospec.types import Draft, Scores, Verdict


class Block(Rule):
    """The longest prefix whose own test succeeds is kept. A draft without q is a point mass. Chains only."""

    name: ClassVar[str] = "block"
    exact: ClassVar[bool] = True
    reads_law: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    noise: ClassVar[Purpose] = Purpose.DRAFT
    native_id: ClassVar[int | None] = 2

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """``weight`` is the paper's p_i of the prefix, ``kept`` its tau: the last length whose draw succeeds."""
        law, n = scores.distribution, len(draft)
        uniforms = draws.uniforms(draft.base_len, n, Purpose.ACCEPT)
        weight, kept, kept_weight = 1.0, 0, 1.0
        for length in range(1, n + 1):
            token = draft.tokens[length - 1]
            drawn_with = 1.0 if draft.q is None else float(draft.q[length - 1, token])
            weight = min(1.0, weight * float(law[length - 1, token]) / drawn_with)
            if uniforms[length - 1] < _chance(weight, law, draft, length):
                kept, kept_weight = length, weight
        position = draft.base_len + kept
        if kept == n:
            return Verdict(tuple(range(n)), scores.draw(n, position, draws), bonus=True)
        rest = residual(law[kept], draft, kept, kept_weight)
        return Verdict(tuple(range(kept)), draws.token(rest, position, Purpose.RECOVER), bonus=False)


def _chance(weight: float, law: Floats, draft: Draft, length: int) -> float:
    """The paper's h_i: a full draft's weight, otherwise the surplus behind the prefix over that and what it lacks."""
    if length == len(draft):
        return weight
    if weight == 0.0:
        return 0.0
    mass = float(surplus(law[length], draft, length, weight).sum())
    return mass / (mass + (1.0 - weight)) if mass > 0.0 else 0.0  # a mass of rounding must not vanish beside a 1
