"""Whole drafts of a pool's members: each member is called once per step, for all of its sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any

from cospec.core.interfaces import Clock
from cospec.core.submitted_step import Future
from cospec.core.tree import chain
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.pool.combiners.combine import Combiner
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.state import DraftTask, Given


@dataclass(frozen=True, slots=True)
class WholeDrafts:
    """Asks members for whole drafts.

    Attributes:
        askable: the members that propose whole drafts, asynchronous members first.
    """

    members: Sequence[Member]
    askable: Sequence[int]
    combiner: Combiner
    clock: Clock

    def ask(self, draft_tasks: Sequence[DraftTask], depths: Sequence[Sequence[int]]) -> list[Given]:
        """Return whole drafts; each drafter is called once for all of its sequences, ``depths[M][R]`` deep.

        Asynchronous drafters are called first.
        """
        asked = [number for number in self.askable if any(depths[number])]
        if not asked:
            return []
        contexts, parts, latest = list[DraftContext](), list[tuple[DraftBudget, ...]](), None
        for context, budget, *_ in draft_tasks:
            if budget is not latest:  # neighbours mostly share a budget
                latest, part = budget, _member_budgets(budget, self.combiner.branches, self.combiner.confident)
            contexts.append(context)
            parts.append(part)
        started, futures, found = self.clock(), dict[int, Future[Any] | None](), dict[int, Sequence[Draft]]()
        for number in asked:
            member, own = self.members[number], depths[number]
            taking = list(compress(contexts, own))
            budgets = [part[depth] for part, depth in zip(parts, own, strict=True) if depth]
            if member.later:
                futures[number] = member.start(taking, budgets)
            else:
                found[number] = member.propose(taking, budgets)
        for number, future in futures.items():
            if future is not None:
                found[number] = self.members[number].collect(future, started, [])
        return self._usable(draft_tasks, found)

    def _usable(self, draft_tasks: Sequence[DraftTask], found: Mapping[int, Sequence[Draft]]) -> list[Given]:
        """Return all drafts that are current and of a shape that the combiner accepts."""
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
                if branches or draft.parents == chain(len(draft.tokens)):
                    given.append((row, number, draft))
        return given


@lru_cache(1024)
def _member_budgets(budget: DraftBudget, branches: bool, confident: bool) -> tuple[DraftBudget, ...]:
    """Return the budget of a drafter by depth: a tree if the policy sets widths and the combiner accepts trees."""
    most = min(budget.depth, budget.max_nodes)
    depths = range(most + 1)
    shapes: list[tuple[int, int, tuple[int, ...]]] = [(depth, depth, ()) for depth in depths]
    if branches and budget.widths:
        shapes = [(budget.depth, budget.max_nodes, budget.widths) for _ in depths]
    confident = budget.confident or confident
    return tuple([DraftBudget(*shape, threshold=budget.threshold, confident=confident) for shape in shapes])
