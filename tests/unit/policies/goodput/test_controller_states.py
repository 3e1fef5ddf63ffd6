"""The states of the controller: what makes a decision old, and what others than it was made for get."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.core.types import DraftBudget
from cospec.policies.goodput.controller_states import (
    DRIFT,
    FIRST_WAIT,
    LONGEST_WAIT,
    LONGEST_WAIT_MIXED,
    NO_DRAFT,
    Assignment,
    Decision,
    Interruption,
    steps_to_next_review,
)
from cospec.policies.goodput.length_optimizer import LengthChoice


def decision(lengths: list[int], new_request: int = 3, **given: object) -> Decision:
    """For requests 0, 1, …"""
    budgets = [DraftBudget(length, length) for length in lengths]
    choice = LengthChoice(np.array(lengths), 1.0, 1.0)
    assigned = Assignment.of([str(n) for n in range(len(lengths))], budgets)
    rates = np.full(len(lengths), 0.5)
    return Decision(assigned, len(lengths), DraftBudget(new_request, new_request), choice=choice, rates=rates, **given)  # type: ignore[arg-type]


def test_before_the_first_decision_any_request_is_one_too_many() -> None:
    first = Decision()
    assert first.resized(1) and first.goodput == 0.0 and first.drafts_for is False and not first.drafts


@pytest.mark.parametrize(("requests", "resized"), [(5, True), (6, False), (11, False), (12, True)])
def test_half_as_many_again_or_as_few_are_another_load(requests: int, resized: bool) -> None:
    assert decision([4] * 8).resized(requests) == resized


def test_whom_the_optimizer_drafts_for() -> None:
    assert [decision(lengths).drafts_for for lengths in ([1, 2], [0, 0], [0, 2])] == [True, False, None]
    assert decision([0, 0]).drafts, "a new request has a draft"
    assert not decision([0, 0], new_request=0).drafts


def test_a_decision_is_old_when_costs_load_or_rates_moved() -> None:
    made = decision([1, 2, 3], costs_version=7, groups=2, other_tokens=80)
    assert made.fits(7, 2, 80) and made.fits(7, 2, 80 + 26) and made.fits(7, 2, 80 - 26)
    assert not made.fits(8, 2, 80) and not made.fits(7, 2, 80 + 27) and not made.fits(7, 2, 80 - 27)
    assert not made.fits(7, 1, 80)
    assert not made.drifted(np.full(3, 0.5 + 0.99 * DRIFT))
    assert made.drifted(np.full(3, 0.5 - 1.01 * DRIFT))
    one = np.array([0.5, 0.5 + 1.7 * DRIFT, 0.5])
    assert not made.drifted(one) and made.drifted(one + 0.1 * DRIFT), "root mean square over the requests"


def test_each_request_keeps_its_length_and_new_ones_get_theirs() -> None:
    made = decision([1, 2, 4], new_request=3)
    assert [budget.depth for budget in made.inherited(["2", "new", "0"])] == [4, 3, 1]
    others = made.reassigned(["2", "new"], made.inherited(["2", "new"]), 9, 50)
    assert (others.count, others.expires, others.new_request, others.choice) == (9, 50, made.new_request, made.choice)
    assert others.assigned.by_id == {"2": DraftBudget(4, 4), "new": DraftBudget(3, 3)}


def test_new_requests_get_no_drafts_where_no_request_has_drafts() -> None:
    made = decision([0, 0], new_request=0, overall_rate=0.25, expires=40)
    others = made.without_drafts(["1", "new", "newer"])
    assert others.assigned.budgets == [NO_DRAFT] * 3 and others.expires == 40 and others.count == 2
    assert not others.drifted(np.full(3, 0.25 + 0.5 * DRIFT)) and others.drifted(np.full(3, 0.5))


def test_new_requests_join_only_interruptions_without_drafts() -> None:
    decided, ids = [DraftBudget(4, 4), DraftBudget(3, 3)], ["1", "new"]
    for length, found in ((2, [2, 3]), (0, [0, 0])):
        budgets = [DraftBudget(length, length)] * 2
        interruption = Interruption(Assignment.of(["0", "1"], budgets), 12).inherited(ids, decided)
        assert [budget.depth for budget in interruption.assigned.budgets] == found
        assert interruption.ends == 12


def test_looks_grow_rarer_while_decisions_stay_alike() -> None:
    for drafts_for, longest in ((None, LONGEST_WAIT_MIXED), (True, LONGEST_WAIT), (False, LONGEST_WAIT)):
        waits = [FIRST_WAIT]
        for _ in range(100):
            waits.append(steps_to_next_review(waits[-1], True, drafts_for))
        assert waits[1] == 2 * FIRST_WAIT and waits == sorted(waits) and waits[-1] == longest
        assert steps_to_next_review(waits[-1], False, drafts_for) == FIRST_WAIT
