"""A step as an optimization problem: draft levels of its sequences, and costs that do not depend on drafts.

The optimizer follows one row of shapes, each with more nodes than the shape before: chains, or trees. A tree of two
levels may be worth more than a chain with as many nodes, since each level takes a pass of the drafter. So there may be
several menus of shapes. The best menu is that with the most tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cospec.core.types import DraftBudget
from cospec.policies.goodput.draft_shapes import DraftShapes, grid_rows, stacked
from cospec.policies.goodput.length_optimizer import (
    DraftLevels,
    Floats,
    Ints,
    LengthChoice,
    StepLimits,
    allocate,
)
from cospec.policies.goodput.step_costs import LengthInputs, StepCosts

Solve = Callable[[DraftLevels, Sequence[StepLimits]], list[LengthChoice]]
Solution = tuple[LengthChoice, list[DraftBudget]]
"""The lengths of a step, and the budgets of its sequences."""


class LengthProblem:
    """The problem with each of several menus, and the menu of the latest ``choose``, at first the first menu."""

    def __init__(self, menus: Sequence[DraftShapes], costs: StepCosts, solve: Solve = allocate) -> None:
        self.menus, self.costs, self.place = menus, costs, 0
        self._solve = solve
        self._levels = stacked(menus)

    @property
    def shapes(self) -> DraftShapes:
        """The latest menu."""
        return self.menus[self.place]

    def choose(self, rates: Floats, inputs: LengthInputs, per_sequence: bool) -> Solution:
        """Choose the menu with the most tokens per second, of equal menus the first; returns as ``solve``."""
        if per_sequence:
            found = self._per_sequence(rates, inputs, slice(None))
        else:
            found = [self._uniform(menu, rates, inputs) for menu in self.menus]
        self.place = max(range(len(found)), key=lambda place: found[place][0].goodput)
        return found[self.place]

    def solve(self, rates: Floats, inputs: LengthInputs, per_sequence: bool) -> Solution:
        """Return the best length of each sequence, or the best common length, from ``rates [n]``."""
        return (self.per_sequence if per_sequence else self.uniform)(rates, inputs)

    def per_sequence(self, rates: Floats, inputs: LengthInputs) -> Solution:
        """Return the best length of each sequence, from ``rates [n]``."""
        return self._per_sequence(rates, inputs, slice(self.place, self.place + 1))[0]

    def uniform(self, rates: Floats, inputs: LengthInputs) -> Solution:
        """Return the best common length of all sequences, from ``rates [n]``."""
        return self._uniform(self.shapes, rates, inputs)

    def _per_sequence(self, rates: Floats, inputs: LengthInputs, places: slice) -> list[Solution]:
        """Return the best length of each sequence, in each of the menus at ``places``."""
        menus, rows = self.menus[places], grid_rows(rates)
        gains, sizes, depths = self._levels
        steps = self._priced(gains[places, rows], sizes[places, rows], depths[places, rows], inputs)
        limits = [self.limits(menu, inputs) for menu in menus]
        idle = limits[0].seconds + float(limits[0].verified[0])
        least = (1.0 + self.costs.latency.doubt) * limits[0].tokens
        found = []
        for menu, choice in zip(menus, self._solve(steps, limits), strict=True):
            if choice.goodput * idle < least:
                choice = LengthChoice(np.zeros_like(choice.counts), limits[0].tokens, idle)
            counts = zip(rows.tolist(), choice.counts.tolist(), strict=True)
            found.append((choice, [menu.budgets[row][k] for row, k in counts]))
        return found

    def _uniform(self, menu: DraftShapes, rates: Floats, inputs: LengthInputs) -> Solution:
        rows, given = grid_rows(rates), self.limits(menu, inputs)
        steps, budgets = self._steps(menu, rows, inputs), menu.budgets[int(rows[0])]
        verified = _totals(steps.sizes)
        count = int(verified[1:].searchsorted(len(given.verified) - 1, side="right"))
        count = min(count, len(budgets) - 1)  # entries beyond the last level are padding, and may look cheap
        tokens = given.tokens + _totals(steps.gains)[: count + 1]
        draft = _totals(steps.costs)[: count + 1]
        draft[1:] += given.levels[steps.depths[0, :count]]
        target = given.verified[verified[: count + 1]]
        seconds = (np.maximum(draft, target) if given.overlap else draft + target) + given.seconds
        ratio = tokens / seconds
        ratio[1:][seconds[1:] > given.longest] = 0.0
        best = int(ratio.argmax())
        if ratio[best] < (1.0 + self.costs.latency.doubt) * ratio[0]:
            best = 0
        choice = LengthChoice(np.full(len(rates), best), float(tokens[best]), float(seconds[best]))
        return choice, [budgets[best]] * len(rates)

    def steps(self, rows: Ints, inputs: LengthInputs) -> DraftLevels:
        """Return the draft levels of each sequence in the latest menu; the arrays are ``[n, J]``."""
        return self._steps(self.shapes, rows, inputs)

    def _steps(self, menu: DraftShapes, rows: Ints, inputs: LengthInputs) -> DraftLevels:
        return self._priced(menu.gains[rows], menu.sizes[rows], menu.depths[rows], inputs)

    def _priced(self, gains: Floats, sizes: Ints, depths: Ints, inputs: LengthInputs) -> DraftLevels:
        costs = np.asarray(sizes * self.costs.token_cost(inputs), dtype=np.float64)
        costs[..., 0] += self.costs.draft_cost
        if inputs.backlog is not None:
            costs[..., 0] += inputs.backlog
        return DraftLevels(gains, sizes, depths, costs)

    def round(self, inputs: LengthInputs) -> StepLimits:
        """Return the step's costs in the latest menu, see ``StepCosts.limits``."""
        return self.limits(self.shapes, inputs)

    def limits(self, menu: DraftShapes, inputs: LengthInputs) -> StepLimits:
        """Return the step's costs in a menu, see ``StepCosts.limits``."""
        return self.costs.limits(inputs, menu.most_tokens, menu.deepest)

    def outcome(self, steps: DraftLevels, counts: Ints, inputs: LengthInputs) -> LengthChoice:
        """Return the expected result of ``counts [n]`` of the levels ``steps`` instead of the best counts.

        Counts beyond the bounds take infinite time.
        """
        given, taken = self.round(inputs), np.arange(steps.gains.shape[1]) < counts[:, None]
        tokens, depth = given.tokens + float(steps.gains[taken].sum()), int(steps.depths[taken].max(initial=0))
        verified, draft = int(steps.sizes[taken].sum()), float(steps.costs[taken].sum() + given.levels[depth])
        target = float(given.verified[verified]) if verified < len(given.verified) else float("inf")
        seconds = given.seconds + (max(draft, target) if given.overlap else draft + target)
        return LengthChoice(counts, tokens, seconds if seconds <= given.longest or not verified else float("inf"))


def _totals(levels: Floats | Ints) -> Floats | Ints:
    """Return the sums of the first 0 to J levels of all sequences, ``[J + 1]``, of ``levels [n, J]``."""
    found = np.zeros(levels.shape[1] + 1, levels.dtype)
    levels.sum(0).cumsum(out=found[1:])
    return found
