"""Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1): not exact, for comparison only."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.tree import depths, path_to
from cospec.core.types import Draft, TargetProbs, VerifyResult
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind

EPSILON = 0.09  # the paper's hard threshold
DELTA = 0.3  # the paper's factor of exp(-entropy)


class Typical(AcceptanceMethod):
    """Accepts tokens with r(x) > min(epsilon, delta exp(-H(r))) whose ancestors were accepted; the deepest path wins.

    A greedy request's distribution has no entropy, so only the most likely token is typical.
    """

    name: ClassVar[str] = "typical"
    exact: ClassVar[bool] = False
    needs_probs: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    stream_kind: ClassVar[StreamKind] = StreamKind.TARGET
    tensor_form: ClassVar[str | None] = "cospec.acceptance.tensor.methods:typical"

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Return the path to the first of the deepest accepted nodes; the next token is drawn from the target
        distribution.
        """
        probs = target.distribution
        kept: list[bool] = []
        for parent, token in zip(draft.parents, draft.tokens, strict=True):
            above = parent < 0 or kept[parent]
            kept.append(above and float(probs[parent + 1, token]) > _threshold(probs[parent + 1]))
        depth = depths(draft.parents)
        end = max((node for node in range(len(draft)) if kept[node]), key=lambda node: (depth[node], -node), default=-1)
        path = path_to(draft.parents, end)
        following = target.draw(end + 1, draft.base_len + len(path), draws)
        return VerifyResult(tuple(path), following, bonus=end not in draft.parents)


def _threshold(probs: Floats) -> float:
    """Return the least probability of a typical token under ``probs [V]``."""
    some = probs[probs > 0]
    return min(EPSILON, DELTA * math.exp(float(np.sum(some * np.log(some)))))
