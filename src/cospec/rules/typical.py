"""Keep what is typical of the target (Cai et al. 2024, Medusa, section 2.3.1): not exact, for comparison only."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from cospec.draws import Draws, Floats, Purpose
from cospec.plugins import Rule
from cospec.tree import depths, path_to
from cospec.types import Draft, Scores, Verdict

EPSILON = 0.09  # the paper's hard threshold
DELTA = 0.3  # and its factor of exp(-entropy)


class Typical(Rule):
    """A token is kept when r(x) > min(epsilon, delta exp(-H(r))), and so were all above it; the deepest such path wins.

    Greedy requests have a law without entropy, under which nothing but the law's own token is typical.
    """

    name: ClassVar[str] = "typical"
    exact: ClassVar[bool] = False
    reads_law: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    noise: ClassVar[Purpose] = Purpose.TARGET

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """The first of the deepest kept nodes ends the path; the token after it is drawn from the law."""
        law = scores.distribution
        kept: list[bool] = []
        for parent, token in zip(draft.parents, draft.tokens, strict=True):
            above = parent < 0 or kept[parent]
            kept.append(above and float(law[parent + 1, token]) > _threshold(law[parent + 1]))
        depth = depths(draft.parents)
        end = max((node for node in range(len(draft)) if kept[node]), key=lambda node: (depth[node], -node), default=-1)
        path = path_to(draft.parents, end)
        following = scores.draw(end + 1, draft.base_len + len(path), draws)
        return Verdict(tuple(path), following, bonus=end not in draft.parents)


def _threshold(law: Floats) -> float:
    """``law [V]`` to the least probability of a typical token."""
    some = law[law > 0]
    return min(EPSILON, DELTA * math.exp(float(np.sum(some * np.log(some)))))
