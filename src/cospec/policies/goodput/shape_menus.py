"""The draft shapes that the optimizer chooses among.

Where a drafter may draft both, there are several menus: chains, and trees of each depth. The menus change with the
acceptance rates by level, and with the lengths in use.
"""

from __future__ import annotations

from cospec.policies.goodput.draft_shapes import DEEPEST, RATES, chains, trees
from cospec.policies.goodput.length_problem import LengthProblem, Solve
from cospec.policies.goodput.level_rates import LevelRates
from cospec.policies.goodput.step_costs import StepCosts
from cospec.policies.policy_build_context import PolicyContext

LONGEST_CHAIN = 32  # tokens, also of a tree's longest path, that a length without configuration grows to


class ShapeChoice:
    """The menus, as a ``problem``.

    Args:
        costs: of steps.
        solve: chooses the lengths of a menu.
        levels: acceptance rates by level, which change the expected tokens of shapes.
        both: chains and trees.
    """

    def __init__(self, context: PolicyContext, costs: StepCosts, solve: Solve, levels: LevelRates, both: bool) -> None:
        self._context, self._costs, self._solve, self._levels = context, costs, solve, levels
        self._both = both
        self._longest = context.longest
        self._rebuild()

    def _rebuild(self) -> None:
        acceptance = self._levels.acceptance(RATES) if self._levels.active else None
        first = trees if self._context.capabilities.trees else chains
        menus = [first(self._longest, acceptance)]
        if self._both:
            menus += [trees(depth, acceptance) for depth in range(1, min(DEEPEST, self._longest) + 1)]
        self.problem = LengthProblem(menus, self._costs, self._solve)

    def refresh(self) -> bool:
        """Read the rates by level again if they moved; returns whether the menus changed."""
        moved = self._levels.active and self._levels.moved
        if moved:
            self._rebuild()
        return moved

    def resize(self, taken: int) -> None:
        """Double the greatest depth from the next decision on, where a request takes all of it.

        Slow links or a slow target call for longer drafts than the default limit. The limit returns by halves where no
        request takes half of the depth, so other decisions examine no more lengths. A configured length is kept.

        Args:
            taken: the greatest depth that the decision chose.
        """
        if not self._context.may_grow or self.problem.place:
            return
        longest = self._longest
        if taken >= longest:
            resized = min(2 * longest, LONGEST_CHAIN)
        elif taken < longest // 2:
            resized = max(longest // 2, self._context.longest)
        else:
            return
        if resized != longest:
            self._longest = resized
            self._rebuild()
