"""Judge a tree by recursive rejection sampling (SpecInfer; Jeon et al. 2024 and EAGLE-2 without replacement).

The children of a node are tested one after the other, in the order in which they were drawn. Each is tested against
what the tests before it have left of the law, and a failed one takes its q away from that.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from cospec.acceptance.residual import residual
from cospec.core.plugins import AcceptanceMethod
from cospec.core.rng import Floats, RandomStreams, StreamKind
from cospec.core.tree import children
from cospec.core.types import Draft, TargetProbs, VerifyResult


class Recursive(AcceptanceMethod):
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
    needs_probs: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    stream_kind: ClassVar[StreamKind] = StreamKind.DRAFT

    def verify(self, draft: Draft, scores: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Go down while a child is accepted; where all fail, the token comes from what they have left."""
        path: list[int] = []
        node = -1
        while True:
            position, offered = draft.base_len + len(path), children(draft.parents, node)
            if not offered:
                return VerifyResult(tuple(path), scores.draw(node + 1, position, draws), bonus=True)
            rest = scores.distribution[node + 1]
            for place, child in enumerate(offered):
                (uniform,) = draws.uniforms(position, 1, StreamKind.ACCEPT, place)
                if uniform * _drawn_with(draft, child) < rest[draft.tokens[child]]:
                    break
                rest = _left(rest, draft, child)
            else:
                return VerifyResult(tuple(path), draws.token(rest, position, StreamKind.RECOVER), bonus=False)
            path.append(child)
            node = child


def _drawn_with(draft: Draft, node: int) -> float:
    """The probability with which the node's token was drawn."""
    return 1.0 if draft.q is None else float(draft.q[node, draft.tokens[node]])


def _left(probs: Floats, draft: Draft, node: int) -> Floats:
    """The law of the token given that the node was rejected: norm(max(0, r - q)), ``[V]``."""
    rest = residual(probs, draft, node)
    return np.asarray(rest / rest.sum())
