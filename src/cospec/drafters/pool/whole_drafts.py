"""Whole drafts of a pool's members: each member is called once per step, for all of its sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import Any

from cospec.core.interfaces import Clock
from cospec.core.submitted_step import Future
from cospec.core.tree import chain
from cospec.core.types import Draft, DraftBudget
from cospec.drafters.pool.combiners.combiner import Combiner
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.state import DraftTask, Given


@dataclass(frozen=True, slots=True)
class WholeDrafts:
    """Asks members for whole drafts.

    Attributes:
        askable: the members that propose whole drafts, asynchronous members first.
        count_hits: see ``DraftBudget``.
    """

    members: Sequence[Member]
    askable: Sequence[int]
    combiner: Combiner
    clock: Clock
    count_hits: bool = False

    def ask(self, draft_tasks: Sequence[DraftTask], depths: Sequence[Sequence[int]]) -> list[Given]:
        """Return whole drafts; each drafter is called once for all of its sequences, ``depths[M][R]`` deep.

        Asynchronous drafters are called first.
        """
        asked = [number for number in self.askable if any(depths[number])]
        if not asked:
            return []
        contexts = [draft_task.context for draft_task in draft_tasks]
        parts = {later: self._budgets(draft_tasks, later) for later in {self.members[number].later for number in asked}}
        started, futures, found = self.clock(), dict[int, Future[Any] | None](), dict[int, Sequence[Draft]]()
        for number in asked:
            member, own = self.members[number], depths[number]
            taking = list(compress(contexts, own))
            budgets = [part[depth] for part, depth in zip(parts[member.later], own, strict=True) if depth]
            if member.later:
                futures[number] = member.start(taking, budgets)
            else:
                found[number] = member.propose(taking, budgets)
        for number, future in futures.items():
            if future is not None:
                found[number] = self.members[number].collect(future, started, [])
        return self._usable(draft_tasks, found)

    def _budgets(self, draft_tasks: Sequence[DraftTask], later: bool) -> list[tuple[DraftBudget, ...]]:
        """Return the budgets of each sequence by depth; asynchronous drafters score known tokens at other times."""
        flags = self.combiner.branches, self.combiner.confident, self.count_hits and not later
        parts, latest = list[tuple[DraftBudget, ...]](), None
        for _, budget, *_ in draft_tasks:
            if budget is not latest:  # neighbours mostly share a budget
                latest, part = budget, _member_budgets(budget, *flags)
            parts.append(part)
        return parts

    def _usable(self, draft_tasks: Sequence[DraftTask], found: Mapping[int, Sequence[Draft]]) -> list[Given]:
        """Return all drafts that are current and of a shape that the combiner accepts.

        A drafter that missed steps is also credited with the tokens that it would have drafted there.
        """
        rows, branches, given = (
            {draft_task.context.id: row for row, draft_task in enumerate(draft_tasks)},
            self.combiner.branches,
            [],
        )
        for number in sorted(found):
            for draft in found[number]:
                row = rows.get(draft.id)
                if row is None or not draft.tokens or draft.base_len != draft_tasks[row].record.base:
                    continue
                budget = draft_tasks[row].budget
                if draft.hits[1]:
                    draft_tasks[row].record.weights.count(number, *draft.hits)
                if branches or budget.outcomes or draft.parents == chain(len(draft.tokens)):
                    given.append((row, number, draft))
        return given


@lru_cache(1024)
def _member_budgets(budget: DraftBudget, branches: bool, confident: bool, count_hits: bool) -> tuple[DraftBudget, ...]:
    """Return the budget of a drafter by depth: a tree if a width is above 1 and the combiner accepts trees."""
    most = min(budget.depth, budget.max_nodes)
    depths = range(most + 1)
    if budget.outcomes:
        return (replace(budget, drafters=None),) * (most + 1)
    shapes: list[tuple[int, int, tuple[int, ...]]] = [(depth, depth, ()) for depth in depths]
    if branches and max(budget.widths, default=1) > 1:
        shapes = [(budget.depth, budget.max_nodes, budget.widths) for _ in depths]
    confident = budget.confident or confident
    return tuple(
        [DraftBudget(*each, threshold=budget.threshold, confident=confident, count_hits=count_hits) for each in shapes]
    )
