"""What is left of the law once the drafter's share is taken away."""

from __future__ import annotations

import numpy as np

from cospec.core.rng import Floats
from cospec.core.types import Draft


def surplus(probs: Floats, draft: Draft, node: int, scale: float = 1.0) -> Floats:
    """``max(0, scale * law - q)`` at ``node`` of a chain, ``[V]``, not normalised; q is a point mass where unset."""
    if draft.q is None:
        rest = scale * probs
        rest[draft.tokens[node]] -= 1.0
    else:
        rest = scale * probs - draft.q[node]
    return np.maximum(rest, 0.0, out=rest)


def residual(probs: Floats, draft: Draft, node: int, scale: float = 1.0) -> Floats:
    """The weights of a recovered token: the surplus, or the law itself where rounding leaves no surplus at all.

    The second case needs a law that equals q to the last bit, where a rejection has the probability of that rounding.
    """
    rest = surplus(probs, draft, node, scale)
    return rest if rest.sum() > 0.0 else probs
