"""Keep what is typical of the target (Cai et al. 2024, Medusa, section 2.3.1): not exact, for comparison only."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from cospec.core.plugins import AcceptanceMethod
from cospec.core.rng import Floats, RandomStreams, StreamKind
from cospec.core.tree import depths, path_to
from cospec.core.types import Draft, TargetProbs, VerifyResult

EPSILON = 0.09  # the paper's hard threshold
DELTA = 0.3  # and its factor of exp(-entropy)


class Typical(AcceptanceMethod):
    """A token is kept when r(x) > min(epsilon, delta exp(-H(r))), and so were all above it; the deepest such path wins.

    Greedy requests have a law without entropy, under which nothing but the law's own token is typical.
    """

    name: ClassVar[str] = "typical"
    exact: ClassVar[bool] = False
    needs_probs: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    stream_kind: ClassVar[StreamKind] = StreamKind.TARGET

    def verify(self, draft: Draft, scores: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """The first of the deepest kept nodes ends the path; the token after it is drawn from the law."""
        probs = scores.distribution
        kept: list[bool] = []
        for parent, token in zip(draft.parents, draft.tokens, strict=True):
            above = parent < 0 or kept[parent]
            kept.append(above and float(probs[parent + 1, token]) > _threshold(probs[parent + 1]))
        depth = depths(draft.parents)
        end = max((node for node in range(len(draft)) if kept[node]), key=lambda node: (depth[node], -node), default=-1)
        path = path_to(draft.parents, end)
        following = scores.draw(end + 1, draft.base_len + len(path), draws)
        return VerifyResult(tuple(path), following, bonus=end not in draft.parents)


def _threshold(probs: Floats) -> float:
    """``law [V]`` to the least probability of a typical token."""
    some = probs[probs > 0]
    return min(EPSILON, DELTA * math.exp(float(np.sum(some * np.log(some)))))
