"""The residual of the target distribution after the drafter's share is subtracted."""

from __future__ import annotations

import numpy as np

from cospec.core.types import Draft
from cospec.rng.random_streams import Floats


def surplus(probs: Floats, draft: Draft, node: int, scale: float = 1.0) -> Floats:
    """Return ``max(0, scale * p - q)`` at ``node`` of a chain, ``[V]``, not normalised.

    q is a point mass for a draft without q.
    """
    if draft.q is None:
        rest = scale * probs
        rest[draft.tokens[node]] -= 1.0
    else:
        rest = scale * probs - draft.q[node]
    return np.maximum(rest, 0.0, out=rest)


def residual(probs: Floats, draft: Draft, node: int, scale: float = 1.0) -> Floats:
    """Return the weights of a recovered token, ``[V]``: the surplus, or ``probs`` if rounding leaves no surplus.

    The second case needs p equal to q up to rounding; a rejection then has the probability of a rounding error.
    """
    rest = surplus(probs, draft, node, scale)
    return rest if rest.sum() > 0.0 else probs
