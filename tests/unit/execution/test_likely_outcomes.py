"""Drafts for several outcomes of a verification: which outcomes, and which draft is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cospec.core.rng import StreamKind
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, Request, RequestState, ScheduledRequest
from cospec.execution.draft_buffer import DraftBuffer, DraftRequest
from cospec.execution.likely_outcomes import AcceptanceRate, likeliest_outcomes
from cospec.sampling_params import SamplingParams

CHAIN = Draft("s", 3, (4, 5, 6), (-1, 0, 1), ("d",) * 3)


@pytest.mark.parametrize(("rate", "wanted"), [(0.9, [2, -1, 0, 1]), (0.5, [2, -1, 0, 1]), (0.01, [2, -1, 0, 1])])
def test_the_whole_chain_comes_first(rate: float, wanted: list[int]) -> None:
    assert likeliest_outcomes(CHAIN, rate) == wanted


def test_confidences_order_the_outcomes() -> None:
    assert likeliest_outcomes(replace(CHAIN, confidence=np.array([0.9, 0.2, 0.9])), 0.5) == [2, 0, -1, 1]


def test_a_tree_has_the_likeliest_path_of_each_length() -> None:
    tree = Draft("s", 3, (4, 5, 6, 7), (-1, -1, 0, 1), ("d",) * 4, confidence=np.array([0.3, 0.6, 0.9, 0.5]))
    assert likeliest_outcomes(tree, 0.5) == [3, 1, -1]


def test_the_rate_follows_what_was_accepted() -> None:
    rate = AcceptanceRate()
    before = rate.value
    rate.learn([Commit("s", 3, (4, 9), (0,), 4, drafted=3, rejected=True)] * 200)
    assert before > rate.value == pytest.approx(0.5, abs=0.02)
    rate.learn([Commit("s", 3, (4,), (), 4)] * 50)
    assert rate.value == pytest.approx(0.5, abs=0.02), "a step without a draft teaches nothing"


def ask(assumed: int, rank: int) -> DraftRequest:
    """A request after ``assumed`` tokens of ``CHAIN``."""
    tokens = [1, 2, 3, *CHAIN.tokens[:assumed]]
    context = DraftContext("s", tokens, 2, SamplingParams(), 0, StreamKind.TARGET, assumed)
    return DraftRequest(context, DraftBudget(4, 12), rank)


def guesses(base: int, *first: int) -> Draft:
    """A draft with several guesses of the next token, each with one token below."""
    n = len(first)
    return Draft("s", base, (*first, *[each + 10 for each in first]), (*[-1] * n, *range(n)), ("d",) * 2 * n)


def entry(tokens: list[int]) -> ScheduledRequest:
    request = Request("s", (1, 2), SamplingParams(), 0)
    return ScheduledRequest(RequestState(request, tokens, len(tokens) - 1), 1, DraftBudget(4, 4))


OUTCOMES = [ask(3, 0), ask(0, 1), ask(1, 2)]
DRAFTS = [guesses(6, 7), guesses(3, 8, 9), guesses(4, 8, 7)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("tokens", "wanted", "used"),
    [
        ([1, 2, 3, 4, 5, 6, 7], (17,), (1, 0)),
        ([1, 2, 3, 9], (19,), (0, 1)),
        ([1, 2, 3, 4, 7], (17,), (0, 1)),
        ([1, 2, 3, 7], None, (0, 0)),
        ([1, 2, 3, 4, 9], None, (0, 0)),
        ([1, 2, 3, 4, 5, 9], None, (0, 0)),
    ],
)
def test_the_draft_of_the_outcome_that_came_true_is_kept(
    tokens: list[int], wanted: tuple[int, ...] | None, used: tuple[int, int], late: bool
) -> None:
    buffer = DraftBuffer()
    buffer.add(OUTCOMES)
    if not late:
        buffer.deliver(OUTCOMES, DRAFTS)
    buffer.drop_stale(entry(tokens))
    if late:
        buffer.deliver(OUTCOMES, DRAFTS)
        buffer.drop_stale(entry(tokens))
    buffer.check_integrity()
    found = buffer.take(entry(tokens))
    assert (found.tokens if found else None) == wanted
    assert found is None or found.base_len == len(tokens)
    assert (buffer.used["likeliest"], buffer.used["other"]) == used
    assert buffer.take(entry(tokens)) is None


def test_what_is_not_there_is_not_waited_for() -> None:
    buffer = DraftBuffer()
    buffer.add(OUTCOMES)
    buffer.deliver(OUTCOMES, DRAFTS[:1])
    buffer.drop_stale(entry([1, 2, 3, 9]))
    assert not buffer.pending and not buffer.ready
