"""The draft buffer keeps every sequence in one place, and knows what of a draft still holds."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.core.types import (
    Draft,
    DraftBudget,
    DraftContext,
    Request,
    RequestState,
    ScheduledRequest,
)
from cospec.execution.draft_buffer import DraftBuffer, DraftRequest, fit_to_budget, rebase
from cospec.rng.random_streams import StreamKind
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
    assert rebase(ask([1, 2, 3]), draft, [1, 2, 3]) is draft
    assert rebase(ask([1, 2, 3]), draft, [1, 2, 3, 4]) is None
    assert rebase(ask([1, 2, 3]), chain(2, 4, 5), [1, 2, 3]) is None


@pytest.mark.parametrize(
    ("tokens", "tail"),
    [
        ([1, 2, 3, 8, 9, 4], (5, 6)),  # all accepted, and the next token is the draft's first
        ([1, 2, 3, 8, 9, 7], None),  # another token follows
        ([1, 2, 3, 8, 7], None),  # rejected
        ([1, 2, 3, 8], None),  # rejected, and still on the way
        ([1, 2, 3, 8, 9], (4, 5, 6)),  # all accepted, and no token after them
        ([1, 2, 3, 8, 9, 4, 5], None),  # judged more than once meanwhile
        ([1, 2, 3], None),  # not judged yet
    ],
)
def test_what_was_made_ahead_goes_on_where_it_was_right(tokens: list[int], tail: tuple[int, ...] | None) -> None:
    found = rebase(ask([1, 2, 3, 8, 9], assumed=2), chain(5, 4, 5, 6), tokens)
    assert (found.tokens if found else None) == tail
    if found is not None:
        assert found.base_len == len(tokens) and found.parents[0] == -1 and found.is_chain
        assert found.q is not None and [int(row.argmax()) for row in found.q] == list(found.tokens)


def test_a_draft_is_cut_to_the_present_budget() -> None:
    draft, tree = chain(3, 4, 5, 6), Draft("s", 3, (4, 5, 6), (-1, -1, 0), ("d",) * 3)
    cut = fit_to_budget(draft, DraftBudget(2, 2))
    assert cut is not None and cut.tokens == (4, 5)
    assert fit_to_budget(draft, DraftBudget(8, 8)) is draft
    assert fit_to_budget(draft, DraftBudget()) is None
    assert fit_to_budget(tree, DraftBudget(2, 3)) is tree
    cut = fit_to_budget(tree, DraftBudget(2, 2))
    assert cut is not None and cut.tokens == (4, 6) and cut.is_chain


def test_late_and_duplicate_answers_are_ignored() -> None:
    buffer, first, second = DraftBuffer(), ask([1, 2, 3]), ask([1, 2, 3, 4])
    buffer.add([first])
    buffer.drop_stale(entry([1, 2, 3, 4]))  # the sequence went on without it
    buffer.add([second])
    buffer.deliver([first], [chain(3, 4, 5)])
    assert buffer.stale == 1 and not buffer.ready
    buffer.deliver([second], [chain(4, 5)])
    buffer.deliver([second], [chain(4, 9)])
    buffer.check_integrity()
    taken = buffer.take(entry([1, 2, 3, 4]))
    assert taken is not None and taken.tokens == (5,)
    assert buffer.take(entry([1, 2, 3, 4])) is None


def test_who_was_left_out_has_no_draft_and_is_not_asked_again() -> None:
    buffer, left = DraftBuffer(), ask([1, 2, 3])
    buffer.add([left])
    buffer.deliver([left], [])
    buffer.drop_stale(entry([1, 2, 3]))
    assert "s" in buffer.ready and buffer.take(entry([1, 2, 3])) is None


def test_a_loss_of_order_is_seen() -> None:
    buffer, one = DraftBuffer(), ask([1, 2, 3])
    buffer.add([one])
    with pytest.raises(AssertionError, match="two drafts"):
        buffer.add([one])
    buffer.ready["s"] = one, None
    with pytest.raises(AssertionError, match="pending and ready"):
        buffer.check_integrity()
    buffer.drop(["s", "unknown"])
    buffer.check_integrity()
    buffer.ready["t"] = one, None
    with pytest.raises(AssertionError, match="another id"):
        buffer.check_integrity()
