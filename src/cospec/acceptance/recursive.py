"""Verify a tree by recursive rejection sampling (SpecInfer; Jeon et al. 2024 and EAGLE-2 without replacement).

The children of a node are tested in the order in which they were drawn. Each child is tested against the residual of
the tests before it; a rejected child's q is subtracted from the residual.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from cospec.acceptance.residual import residual
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.tree import children
from cospec.core.types import Draft, TargetProbs, VerifyResult
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind


class Recursive(AcceptanceMethod):
    """``recursive``: exact for trees whose drafter keeps three conditions.

    1. The token of a node was drawn from ``q[node]``, a function of the tokens above the node and of its elder
       siblings. Elder siblings are children of the same parent with smaller indices. Without replacement ``q[node]`` is
       the parent's distribution without the elder siblings, renormalised; with replacement it is the parent's
       distribution.
    2. All draws are independent, including the draws of cousins.
    3. The decision to include a node did not depend on its own token or on those of its younger siblings.

    A draft without q was chosen deterministically: each token is a point mass. On a chain the method equals
    ``rejection``.
    """

    name: ClassVar[str] = "recursive"
    exact: ClassVar[bool] = True
    needs_probs: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    stream_kind: ClassVar[StreamKind] = StreamKind.DRAFT
    tensor_form: ClassVar[str | None] = "cospec.acceptance.tensor.methods:recursive"

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Descend while a child is accepted; if all children fail, the next token is drawn from the residual."""
        path: list[int] = []
        node = -1
        while True:
            position, offered = draft.base_len + len(path), children(draft.parents, node)
            if not offered:
                return VerifyResult(tuple(path), target.draw(node + 1, position, draws), bonus=True)
            rest = target.distribution[node + 1]
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
    """Return the probability with which the node's token was drawn."""
    return 1.0 if draft.q is None else float(draft.q[node, draft.tokens[node]])


def _left(probs: Floats, draft: Draft, node: int) -> Floats:
    """Return the distribution after the node's rejection, norm(max(0, r - q)), ``[V]``."""
    rest = residual(probs, draft, node)
    return np.asarray(rest / rest.sum())
