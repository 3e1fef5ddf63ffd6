"""States of the goodput controller and their transitions.

A ``Decision`` holds until a review of the observations makes a new decision. An ``Interruption`` replaces it for a few
steps: a probe, or a trial of other draft lengths. All values are frozen, and no function has side effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cospec.core.types import DraftBudget
from cospec.policies.goodput.length_optimizer import LengthChoice
from cospec.policies.latency.forward import Floats

# When to review observations. A review learns, and may make a new decision.
REVIEW_SECONDS = 0.25  # maximum observed time between reviews
FIRST_WAIT = 4  # steps to the next review after an unstable review; each stable review adds as many
LONGEST_WAIT_MIXED = 64  # maximum steps to the next review, where some requests have drafts and others have none
LONGEST_WAIT = 256  # the same where all requests have drafts or none; also the calls that are stored without a plan

# When a decision is outdated.
KEEP = 64  # steps after which the next review makes a new decision
DRIFT = 0.04  # change of the acceptance rates, root mean square over the requests
OTHER_TOKENS = 16  # change of other requests' known tokens, in addition to an eighth of the former number
RESIZED = 1.5  # factor between the number of requests and the number that the lengths were chosen for

# Exploration.
OPTIMISTIC_RATE = 0.9  # a probe is considered where this acceptance rate would make drafts pay

NO_DRAFT = DraftBudget()


@dataclass(frozen=True, slots=True)
class Assignment:
    """Budgets of requests.

    Attributes:
        ids: the requests.
        budgets: one for each request, in order.
        by_id: the same budgets by request.
    """

    ids: Sequence[str]
    budgets: list[DraftBudget]
    by_id: Mapping[str, DraftBudget]

    @classmethod
    def of(cls, ids: Sequence[str], budgets: list[DraftBudget]) -> Assignment:
        """``budgets [n]`` for ``ids [n]``."""
        return cls(ids, budgets, dict(zip(ids, budgets, strict=True)))


@dataclass(frozen=True, slots=True)
class Decision:
    """Draft lengths, and what they were chosen for.

    Attributes:
        assigned: the budgets of the present requests. Requests may come and go while the decision holds.
        count: the number of requests that the lengths were chosen for.
        new_request: the budget of a request whose acceptance rate is unknown.
        by_count: such budgets by the number of requests; all were chosen with the same version of the costs, and as
            many groups.
        choice: the optimizer's solution; None before the first decision.
        rates: ``[n]``, acceptance rates of the requests, or one rate for all.
        overall_rate: acceptance rate of all requests together.
        groups: parts of the requests with drafts, of which a step verifies one.
        costs_version: of the time model.
        other_tokens: known tokens of other requests in the step.
        expires: the step after which the next review makes a new decision.
    """

    assigned: Assignment = Assignment((), [], {})
    count: int = 0
    new_request: DraftBudget = NO_DRAFT
    by_count: Mapping[int, DraftBudget] = field(default_factory=dict)
    choice: LengthChoice | None = None
    rates: Floats | float = 0.0
    overall_rate: float = 0.0
    groups: int = 1
    costs_version: int = -1
    other_tokens: int = 0
    expires: int = 0

    @property
    def goodput(self) -> float:
        """Expected committed tokens per second; 0 before the first decision."""
        return self.choice.goodput if self.choice else 0.0

    @property
    def drafts_for(self) -> bool | None:
        """True: the optimizer drafts for all requests. False: for none. None: for some."""
        if self.choice is None:
            return False
        drafted = {count > 0 for count in self.choice.counts.tolist()}
        return drafted.pop() if len(drafted) == 1 else None

    @property
    def drafts(self) -> bool:
        """Whether any request has a draft, or a new request would have one."""
        return self.new_request.depth > 0 or any([budget.depth for budget in self.assigned.budgets])

    def resized(self, requests: int) -> bool:
        """Whether so many requests are far more or far fewer than the lengths were chosen for."""
        return not requests < RESIZED * self.count < RESIZED**2 * requests

    def fits(self, costs_version: int, groups: int, other_tokens: int) -> bool:
        """Whether the costs and the rest of the step are as they were."""
        tolerated = OTHER_TOKENS + self.other_tokens // 8
        same = (costs_version, groups) == (self.costs_version, self.groups)
        return same and abs(other_tokens - self.other_tokens) <= tolerated

    def drifted(self, rates: Floats) -> bool:
        """Whether the acceptance rates, now ``rates [n]``, moved so far that the decision is old."""
        moved = rates - self.rates
        return float(moved @ moved) > len(moved) * DRIFT**2

    def without_drafts(self, ids: Sequence[str]) -> Decision:
        """The same decision for other requests, where no request has a draft and no new request gets one."""
        return replace(self, assigned=Assignment.of(ids, [NO_DRAFT] * len(ids)), rates=self.overall_rate)

    def inherited(self, ids: Sequence[str]) -> list[DraftBudget]:
        """Budgets for other requests: each keeps its own, new ones get theirs.

        The length of a request that ended says little about the next request.
        """
        return [self.assigned.by_id.get(id, self.new_request) for id in ids]

    def reassigned(self, ids: Sequence[str], budgets: list[DraftBudget], count: int, step: int) -> Decision:
        """The same decision with other budgets, until the first review after ``step``."""
        return replace(self, assigned=Assignment.of(ids, budgets), count=count, expires=step)


@dataclass(frozen=True, slots=True)
class Interruption:
    """What takes the place of a decision for a few steps; afterwards the decision's budgets return.

    Attributes:
        assigned: the budgets of the present requests.
        ends: the first step that the decision is back for.
    """

    assigned: Assignment
    ends: int

    def inherited(self, ids: Sequence[str], decided: Sequence[DraftBudget]) -> Interruption:
        """The same interruption for other requests; new ones keep their ``decided`` budgets.

        A step without any draft is one for all requests, so new ones get no draft there either.
        """
        given = self.assigned.by_id
        undrafted = not any([budget.depth for budget in given.values()])
        budgets = [NO_DRAFT if undrafted else given.get(*each) for each in zip(ids, decided, strict=True)]
        return Interruption(Assignment.of(ids, budgets), self.ends)


def steps_to_next_review(latest: int, stable: bool, drafts_for: bool | None) -> int:
    """Return the number of steps to the next review; the number grows while decisions stay alike.

    Args:
        latest: maximum steps between the last two reviews.
        stable: the latest review did not change ``Decision.drafts_for``.
        drafts_for: as ``Decision.drafts_for``.
    """
    return min(
        latest + FIRST_WAIT if stable else FIRST_WAIT, LONGEST_WAIT_MIXED if drafts_for is None else LONGEST_WAIT
    )
