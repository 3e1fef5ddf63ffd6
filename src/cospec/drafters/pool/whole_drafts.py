"""Whole drafts of a pool's members: each member is called once per step, for all of its sequences.

While a verification runs, idle members on nodes may draft after other outcomes than the likeliest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

from cospec.core.interfaces import Clock
from cospec.core.submitted_step import Future
from cospec.core.tree import chain
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.pool.combiners.combiner import Combiner
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.state import DraftTask, Given

Outcome = tuple[DraftContext, DraftBudget]
"""A sequence after one outcome of the verification in flight, and the budget of a draft."""


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
                if draft.hits[1]:
                    draft_tasks[row].record.weights.count(number, *draft.hits)
                if branches or draft.parents == chain(len(draft.tokens)):
                    given.append((row, number, draft))
        return given


@lru_cache(1024)
def _member_budgets(budget: DraftBudget, branches: bool, confident: bool, count_hits: bool) -> tuple[DraftBudget, ...]:
    """Return the budget of a drafter by depth: a tree if the policy sets widths and the combiner accepts trees."""
    most = min(budget.depth, budget.max_nodes)
    depths = range(most + 1)
    shapes: list[tuple[int, int, tuple[int, ...]]] = [(depth, depth, ()) for depth in depths]
    if branches and budget.widths:
        shapes = [(budget.depth, budget.max_nodes, budget.widths) for _ in depths]
    confident = budget.confident or confident
    return tuple(
        [DraftBudget(*each, threshold=budget.threshold, confident=confident, count_hits=count_hits) for each in shapes]
    )


class PendingOutcomeDrafts(NamedTuple):
    """Drafts on their way from one drafter."""

    member: Member
    future: Future[Any]
    started: float

    def collect(self) -> list[Draft]:
        """Return the drafts that come before the deadline."""
        drafts: list[Draft] = self.member.collect(self.future, self.started, [])
        return drafts


def start_outcomes(
    others: Sequence[Outcome], idle: Sequence[Member], rank: Callable[[str], Sequence[float]], clock: Clock
) -> list[PendingOutcomeDrafts]:
    """Ask each idle drafter about one outcome of each request; a request's heaviest drafter gets its likeliest outcome.

    Args:
        rank: the weights of a request's idle drafters; 0 for a drafter that the request excludes.
    """
    shares, left = [list[Outcome]() for _ in idle], dict[str, list[int]]()
    for context, budget in others:
        if context.id not in left:
            weights = rank(context.id)
            left[context.id] = sorted([at for at in range(len(idle)) if weights[at]], key=lambda at: weights[at])
        if left[context.id]:
            shares[left[context.id].pop()].append((context, budget))
    started, found = clock(), list[PendingOutcomeDrafts]()
    for member, share in zip(idle, shares, strict=True):
        future = member.start_outcomes(share) if share else None
        if future is not None:
            found.append(PendingOutcomeDrafts(member, future, started))
    return found
