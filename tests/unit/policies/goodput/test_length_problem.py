"""A round as a problem: what no menu has is never chosen."""

from __future__ import annotations

import numpy as np

from cospec.core.types import BatchState
from cospec.policies.goodput.draft_shapes import grid_rows, trees
from cospec.policies.goodput.length_problem import LengthProblem
from cospec.policies.goodput.step_costs import StepCosts
from cospec.policies.latency.depth_correction import LONGEST, DepthCorrection
from cospec.policies.latency.step import StepLatency
from harness.execution import FLAT, sequences


class DeepIsCheap(DepthCorrection):
    """As where the rounds with the longest drafts were measured in a quick moment."""

    def excess(self, requests: int) -> np.ndarray:
        found = np.zeros(LONGEST + 1)
        found[8:] = -0.6
        return found


def test_cheap_deep_drafts_do_not_extend_the_list_of_trees() -> None:
    shapes, cost = trees(8), StepLatency(FLAT)
    cost.correction = DeepIsCheap()
    problem = LengthProblem([shapes], StepCosts(cost))
    for rate in (0.0, 0.05, 0.3, 0.7, 1.0):
        for per_sequence in (False, True):
            inputs = problem.costs.inputs(BatchState(sequences(4)), [200] * 4, None)
            choice, budgets = problem.solve(np.full(4, rate), inputs, per_sequence)
            budgets_of = shapes.budgets[int(grid_rows(np.array([rate]))[0])]
            assert [budgets_of[count] for count in choice.counts] == budgets
