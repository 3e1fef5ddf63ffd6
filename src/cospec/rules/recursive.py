"""Judge a tree by recursive rejection sampling (SpecInfer; Jeon et al. 2024 and EAGLE-2 without replacement).

The children of a node are tested one after the other, in the order in which they were drawn. Each is tested against
what the tests before it have left of the law, and a failed one takes its q away from that.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from cospec.draws import Draws, Floats, Purpose
from cospec.plugins import Rule
from cospec.rules.residual import residual
from cospec.tree import children
from cospec.types import Draft, Scores, Verdict


class Recursive(Rule):
    """Spec section 3, ``recursive``: exact for trees whose drafter keeps three promises.

    1. The token of a node was drawn from ``q[node]``, which is a function of the tokens above the node and of its
       elder siblings, the children of its parent with smaller indices. Without replacement ``q[node]`` is the parent's
       distribution with the elder siblings taken out, renormalised; with replacement it is that distribution itself.
    2. The draws are independent of one another, those of cousins too.
    3. Whether a node is in the draft was decided without its own token and those of its younger siblings.

    A draft without q chose its tokens: each is a point mass. On a chain this is ``rejection``.
    """

    name: ClassVar[str] = "recursive"
    exact: ClassVar[bool] = True
    reads_law: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    noise: ClassVar[Purpose] = Purpose.DRAFT

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Go down while a child is accepted; where all fail, the token comes from what they have left."""
        path: list[int] = []
        node = -1
        while True:
            position, offered = draft.base_len + len(path), children(draft.parents, node)
            if not offered:
                return Verdict(tuple(path), scores.draw(node + 1, position, draws), bonus=True)
            rest = scores.distribution[node + 1]
            for place, child in enumerate(offered):
                (uniform,) = draws.uniforms(position, 1, Purpose.ACCEPT, place)
                if uniform * _drawn_with(draft, child) < rest[draft.tokens[child]]:
                    break
                rest = _left(rest, draft, child)
            else:
                return Verdict(tuple(path), draws.token(rest, position, Purpose.RECOVER), bonus=False)
            path.append(child)
            node = child


def _drawn_with(draft: Draft, node: int) -> float:
    """The probability with which the node's token was drawn."""
    return 1.0 if draft.q is None else float(draft.q[node, draft.tokens[node]])


def _left(law: Floats, draft: Draft, node: int) -> Floats:
    """The law of the token given that the node was rejected: norm(max(0, r - q)), ``[V]``."""
    rest = residual(law, draft, node)
    return np.asarray(rest / rest.sum())
