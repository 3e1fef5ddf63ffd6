"""A step as an optimization problem: draft levels of its sequences, and costs that do not depend on drafts.

The optimizer follows one row of shapes, each with more nodes than the shape before: chains, or trees. A tree of two
levels may be worth more than a chain with as many nodes, since each level takes a pass of the drafter. So there may be
several menus of shapes. The best menu is that with the most tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from cospec.core.types import DraftBudget
from cospec.policies.goodput.draft_shapes import GRID, DraftShapes, grid_rows, stacked
from cospec.policies.goodput.length_optimizer import (
    DraftLevels,
    Floats,
    Ints,
    LengthChoice,
    StepLimits,
    allocate,
)
from cospec.policies.goodput.step_costs import LengthInputs, StepCosts

Solve = Callable[[DraftLevels, StepLimits], list[LengthChoice]]
Solution = tuple[LengthChoice, list[DraftBudget]]
"""The lengths of a step, and the budgets of its sequences."""


class LengthProblem:
    """The problem with each of several menus, and the menu of the latest ``choose``, at first the first menu."""

    def __init__(self, menus: Sequence[DraftShapes], costs: StepCosts, solve: Solve = allocate) -> None:
        self.menus, self.costs, self.place = menus, costs, 0
        self._solve = solve
        self._levels = stacked(menus)
        self._most_tokens, self._deepest = max(menu.most_tokens for menu in menus), max(menu.deepest for menu in menus)

    @property
    def shapes(self) -> DraftShapes:
        """The latest menu."""
        return self.menus[self.place]

    def choose(self, rates: Floats, inputs: LengthInputs, per_sequence: bool) -> Solution:
        """Choose the menu with the most tokens per second, of equal menus the first; returns as ``solve``."""
        if per_sequence:
            rows = grid_rows(rates)
            choices = self._per_sequence(rows, inputs, slice(None))
            self.place = max(range(len(choices)), key=lambda place: choices[place].goodput)
            return self._solution(choices[self.place], rows)
        found = [self._uniform(menu, float(rates[0]), inputs) for menu in self.menus]
        self.place = max(range(len(found)), key=lambda place: found[place][0].goodput)
        return found[self.place]

    def solve(self, rates: Floats, inputs: LengthInputs, per_sequence: bool) -> Solution:
        """Return the best length of each sequence, from ``rates [n]``, or the best common length, from the first."""
        return self.per_sequence(rates, inputs) if per_sequence else self.uniform(float(rates[0]), inputs)

    def per_sequence(self, rates: Floats, inputs: LengthInputs) -> Solution:
        """Return the best length of each sequence, from ``rates [n]``."""
        rows = grid_rows(rates)
        (choice,) = self._per_sequence(rows, inputs, slice(self.place, self.place + 1))
        return self._solution(choice, rows)

    def uniform(self, rate: float, inputs: LengthInputs) -> Solution:
        """Return the best common length of all sequences, which have a common rate."""
        return self._uniform(self.shapes, rate, inputs)

    def _per_sequence(self, rows: Ints, inputs: LengthInputs, places: slice) -> list[LengthChoice]:
        """Return the best length of each sequence, in each of the menus at ``places``."""
        steps = self._priced(rows, inputs, places)
        given = self.limits(inputs)
        nothing = given.undrafted(len(rows))
        least = (1.0 + self.costs.latency.doubt) * nothing.goodput
        return [choice if choice.goodput >= least else nothing for choice in self._solve(steps, given)]

    def _solution(self, choice: LengthChoice, rows: Ints) -> Solution:
        """Return the choice and its budgets in the latest menu."""
        budgets = self.shapes.budgets
        return choice, [budgets[row][k] for row, k in zip(rows.tolist(), choice.counts.tolist(), strict=True)]

    def _uniform(self, menu: DraftShapes, rate: float, inputs: LengthInputs) -> Solution:
        given, n, row = self.limits(inputs), inputs.sequences, round(rate * GRID)
        budgets, token_cost = menu.budgets[row], self.costs.token_cost(inputs)
        group = n / inputs.groups
        tokens, verified, draft = given.tokens - n + group, group - n, group * self.costs.draft_cost
        if inputs.backlog is not None:
            draft += float(inputs.backlog.sum())
        nothing = given.undrafted(n)
        best = 0, nothing.tokens, nothing.seconds
        goodput = nothing.goodput if len(given.verified) > 1 else float("inf")
        levels = zip(menu.gains[row].tolist(), menu.sizes[row].tolist(), menu.depths[row].tolist(), strict=True)
        # levels beyond the last budget are padding, and may look cheap
        for count, (gain, size, depth) in enumerate(islice(levels, len(budgets) - 1), 1):
            tokens, verified, draft = tokens + group * gain, verified + group * size, draft + group * size * token_cost
            seconds = given.duration(verified, draft, depth)
            if tokens / seconds > goodput:
                best, goodput = (count, tokens, seconds), tokens / seconds
        if goodput < (1.0 + self.costs.latency.doubt) * nothing.goodput:
            return nothing, [budgets[0]] * n
        count, tokens, seconds = best
        return LengthChoice(np.full(n, count), tokens, seconds), [budgets[count]] * n

    def steps(self, rows: Ints, inputs: LengthInputs) -> DraftLevels:
        """Return the draft levels of each sequence in the latest menu; the arrays are ``[n, J]``."""
        return self._priced(rows, inputs, self.place)

    def _priced(self, rows: Ints, inputs: LengthInputs, places: slice | int) -> DraftLevels:
        """Return the draft levels of each sequence in the menus at ``places``.

        Where a step verifies one of several groups, the levels have their means over steps. The first level then also
        has the token that the sequence does not commit, and does not compute, in the steps of other groups.
        """
        shapes, depths = self._levels[0][:, places, rows], self._levels[1][places, rows]
        values = np.empty((3, *depths.shape))
        values[:2] = shapes
        costs = np.multiply(shapes[1], self.costs.token_cost(inputs), out=values[2])
        costs[..., 0] += self.costs.draft_cost
        if inputs.groups > 1:
            values /= inputs.groups
            values[:2, ..., 0] -= 1.0 - 1.0 / inputs.groups
        if inputs.backlog is not None:
            costs[..., 0] += inputs.backlog
        return DraftLevels(values, depths)

    def limits(self, inputs: LengthInputs) -> StepLimits:
        """Return the step's costs, see ``StepCosts.limits``."""
        return self.costs.limits(inputs, self._most_tokens, self._deepest)

    def outcomes(self, steps: DraftLevels, counts: Ints, inputs: LengthInputs) -> list[LengthChoice]:
        """Return the expected results of ``counts [K, n]`` of the levels ``steps`` instead of the best counts."""
        given, taken = self.limits(inputs), np.arange(steps.gains.shape[1]) < counts[:, :, None]
        gains, sizes, costs = (taken * steps.values[:, None]).sum(axis=(2, 3)).tolist()
        depths = (taken * steps.depths).max(axis=(1, 2))
        found = zip(counts, gains, sizes, costs, depths.tolist(), strict=True)
        return [
            LengthChoice(count, given.tokens + gain, given.duration(size, cost, depth))
            for count, gain, size, cost, depth in found
        ]
