"""Drafters on nodes without a part in a step draft after other outcomes of the verification in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cospec.core.interfaces import Clock
from cospec.core.submitted_step import Future
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.pool.members import Member

Outcome = tuple[DraftContext, DraftBudget]


class OutcomeDrafts(NamedTuple):
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
) -> list[OutcomeDrafts]:
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
    started, found = clock(), list[OutcomeDrafts]()
    for member, share in zip(idle, shares, strict=True):
        future = member.start_outcomes(share) if share else None
        if future is not None:
            found.append(OutcomeDrafts(member, future, started))
    return found
