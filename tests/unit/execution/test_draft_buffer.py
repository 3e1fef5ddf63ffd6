"""The draft pool keeps every sequence in one place, and knows what of a draft still holds."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.core.rng import StreamKind
from cospec.core.types import (
    Draft,
    DraftBudget,
    DraftContext,
    Request,
    RequestState,
    ScheduledRequest,
)
from cospec.execution.draft_buffer import DraftBuffer, DraftRequest, continued, fitted
from cospec.sampling_params import SamplingParams


def ask(tokens: list[int], assumed: int = 0, id: str = "s") -> DraftRequest:
    return DraftRequest(DraftContext(id, tokens, 2, SamplingParams(), 0, StreamKind.DRAFT, assumed), DraftBudget(4, 4))


def chain(base: int, *tokens: int, id: str = "s") -> Draft:
    n = len(tokens)
    return Draft(id, base, tokens, tuple(range(-1, n - 1)), ("d",) * n, np.eye(10)[list(tokens)])


def entry(tokens: list[int], depth: int = 4, id: str = "s") -> ScheduledRequest:
    request = Request(id, tuple(tokens[:2]), SamplingParams(), 0)
    return ScheduledRequest(RequestState(request, tokens, len(tokens) - 1), 1, DraftBudget(depth, depth))


def test_a_draft_holds_while_its_sequence_stands_still() -> None:
    draft = chain(3, 4, 5)
    assert continued(ask([1, 2, 3]), draft, [1, 2, 3]) is draft
    assert continued(ask([1, 2, 3]), draft, [1, 2, 3, 4]) is None
    assert continued(ask([1, 2, 3]), chain(2, 4, 5), [1, 2, 3]) is None


@pytest.mark.parametrize(
    ("tokens", "tail"),
    [
        ([1, 2, 3, 8, 9, 4], (5, 6)),  # all accepted, and the next token is the draft's first
        ([1, 2, 3, 8, 9, 7], None),  # another token follows
        ([1, 2, 3, 8, 7], None),  # rejected
        ([1, 2, 3, 8], None),  # rejected, and still on the way
        ([1, 2, 3, 8, 9], (4, 5, 6)),  # all accepted, and nothing behind it
        ([1, 2, 3, 8, 9, 4, 5], None),  # judged more than once meanwhile
        ([1, 2, 3], None),  # not judged yet
    ],
)
def test_what_was_made_ahead_goes_on_where_it_was_right(tokens: list[int], tail: tuple[int, ...] | None) -> None:
    found = continued(ask([1, 2, 3, 8, 9], assumed=2), chain(5, 4, 5, 6), tokens)
    assert (found.tokens if found else None) == tail
    if found is not None:
        assert found.base_len == len(tokens) and found.parents[0] == -1 and found.is_chain
        assert found.q is not None and [int(row.argmax()) for row in found.q] == list(found.tokens)


def test_a_draft_is_cut_to_the_present_budget() -> None:
    draft, tree = chain(3, 4, 5, 6), Draft("s", 3, (4, 5, 6), (-1, -1, 0), ("d",) * 3)
    cut = fitted(draft, DraftBudget(2, 2))
    assert cut is not None and cut.tokens == (4, 5)
    assert fitted(draft, DraftBudget(8, 8)) is draft
    assert fitted(draft, DraftBudget()) is None
    assert fitted(tree, DraftBudget(2, 3)) is tree
    assert fitted(tree, DraftBudget(2, 2)) is None


def test_late_and_duplicate_answers_are_ignored() -> None:
    pool, first, second = DraftBuffer(), ask([1, 2, 3]), ask([1, 2, 3, 4])
    pool.expect([first])
    pool.review(entry([1, 2, 3, 4]))  # the sequence went on without it
    pool.expect([second])
    pool.deliver([first], [chain(3, 4, 5)])
    assert pool.stale == 1 and not pool.ready
    pool.deliver([second], [chain(4, 5)])
    pool.deliver([second], [chain(4, 9)])
    pool.check_integrity()
    taken = pool.take(entry([1, 2, 3, 4]))
    assert taken is not None and taken.tokens == (5,)
    assert pool.take(entry([1, 2, 3, 4])) is None


def test_who_was_left_out_has_no_draft_and_is_not_asked_again() -> None:
    pool, left = DraftBuffer(), ask([1, 2, 3])
    pool.expect([left])
    pool.deliver([left], [])
    pool.review(entry([1, 2, 3]))
    assert "s" in pool.ready and pool.take(entry([1, 2, 3])) is None


def test_a_loss_of_order_is_seen() -> None:
    pool, one = DraftBuffer(), ask([1, 2, 3])
    pool.expect([one])
    with pytest.raises(AssertionError, match="twice"):
        pool.expect([one])
    pool.ready["s"] = one, None
    with pytest.raises(AssertionError, match="while its draft waits"):
        pool.check_integrity()
    pool.drop(["s", "unknown"])
    pool.check_integrity()
    pool.ready["t"] = one, None
    with pytest.raises(AssertionError, match="another name"):
        pool.check_integrity()
