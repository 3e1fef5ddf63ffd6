"""The draft shapes that the optimizer chooses among.

The optimizer follows one row of shapes, each with more nodes than the shape before: chains, or trees. A tree of two
levels may be worth more than a chain with as many nodes, since each level takes a pass of the drafter. So where a
drafter may draft both, there are several menus: chains, and trees of each depth. Each decision takes the menu with the
most tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable

from cospec.core.types import DraftBudget
from cospec.policies.goodput.acceptance_rates import Floats
from cospec.policies.goodput.draft_shapes import DEEPEST, RATES, DraftShapes, chains, trees
from cospec.policies.goodput.length_optimizer import LengthChoice
from cospec.policies.goodput.length_problem import LengthInputs, LengthProblem
from cospec.policies.goodput.level_rates import LevelRates
from cospec.policies.policy_build_context import PolicyContext

LONGEST_CHAIN = 32  # that a length without configuration grows to


class ShapeChoice:
    """The menus, and the menu of the latest decision, ``problem``.

    Args:
        pose: makes the problem of a menu.
        levels: acceptance rates by level, which change the expected tokens of shapes.
        both: chains and trees.
    """

    def __init__(
        self, context: PolicyContext, pose: Callable[[DraftShapes], LengthProblem], levels: LevelRates, both: bool
    ) -> None:
        self._context, self._pose, self._levels = context, pose, levels
        self._both = both
        self._longest = context.longest
        self._rebuild()

    def _rebuild(self) -> None:
        acceptance = self._levels.acceptance(RATES) if self._levels.active else None
        first = trees if self._context.capabilities.trees else chains
        menus = [first(self._longest, acceptance)]
        if self._both:
            menus += [trees(depth, acceptance) for depth in range(1, min(DEEPEST, self._longest) + 1)]
        self._problems = [self._pose(menu) for menu in menus]
        self.problem = self._problems[0]

    def refresh(self) -> bool:
        """Read the rates by level again if they moved; returns whether the menus changed."""
        moved = self._levels.active and self._levels.moved
        if moved:
            self._rebuild()
        return moved

    def solve(self, rates: Floats, inputs: LengthInputs, per_sequence: bool) -> tuple[LengthChoice, list[DraftBudget]]:
        """Return the best lengths of the best menu, for each sequence or common to all; ``rates [n]``."""
        found = [(problem, *problem.solve(rates, inputs, per_sequence)) for problem in self._problems]
        self.problem, choice, budgets = max(found, key=lambda each: each[1].goodput)
        return choice, budgets

    def resize(self, choice: LengthChoice) -> None:
        """Double the longest chain from the next decision on, where a request takes all of the longest.

        Slow links or a slow target call for longer drafts than the default limit. The limit returns by halves where no
        request takes half of the longest, so other decisions examine no more lengths. A configured length is kept.
        """
        if not self._context.may_grow or self.problem is not self._problems[0]:
            return
        longest, taken = self._longest, int(choice.counts.max(initial=0))
        if taken >= longest:
            resized = min(2 * longest, LONGEST_CHAIN)
        elif taken < longest // 2:
            resized = max(longest // 2, self._context.longest)
        else:
            return
        if resized != longest:
            self._longest = resized
            self._rebuild()
