"""A round as a problem: what no menu has is never chosen."""

from __future__ import annotations

import numpy as np

from cospec.policies.depth_correction import LONGEST, DepthCorrection
from cospec.policies.menu import trees
from cospec.policies.problem import Bounds, Problem
from cospec.policies.round_cost import RoundCost
from cospec.types import Load
from harness.rounds import FLAT, sequences


class DeepIsCheap(DepthCorrection):
    """As where the rounds with the longest drafts were measured in a quick moment."""

    def excess(self, requests: int) -> np.ndarray:
        found = np.zeros(LONGEST + 1)
        found[8:] = -0.6
        return found


def test_a_short_menu_of_trees_is_not_left_where_deep_drafts_are_cheap() -> None:
    menu, cost = trees(8), RoundCost(FLAT)
    cost.correction = DeepIsCheap()
    problem = Problem(menu, cost, Bounds())
    for rate in (0.0, 0.05, 0.3, 0.7, 1.0):
        for solve in (problem.alike, problem.each):
            choice, budgets = solve(np.full(4, rate), problem.situation(Load(sequences(4)), [200] * 4, None))
            shapes = menu.budgets[int(menu.rows(np.array([rate]))[0])]
            assert [shapes[count] for count in choice.counts] == budgets
