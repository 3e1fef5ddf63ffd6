"""What a new process is given of a request whose process or replica was lost."""

from __future__ import annotations

import asyncio

import pytest

from cospec.core.types import Event
from cospec.runtime.request_replay import MAX_CRASHES, LiveRequest
from cospec.sampling_params import SamplingParams
from harness.toys import make_request


def live(resumed: tuple[int, ...] | None) -> LiveRequest:
    request = make_request("r", (0, 1), SamplingParams(max_tokens=8), resumed_output=resumed)
    return LiveRequest(request, asyncio.Queue())


@pytest.mark.parametrize(("before", "whole"), [(None, (4, 5, 6)), ((2, 3), (2, 3, 4, 5, 6))])
def test_a_request_goes_on_after_all_that_was_delivered(before: tuple[int, ...] | None, whole: tuple[int, ...]) -> None:
    """Also what an earlier replica delivered, where the engine process of a later replica is lost."""
    made = live(before)
    for tokens in ((4, 5), (6,)):
        made.deliver(Event("r", "r", 0, "", tokens, ("target",) * len(tokens)), 1.0)
    assert made.resumed().resumed_output == whole


def test_a_request_without_tokens_is_marked_as_resumed() -> None:
    """Such a request has another seed, because others may have seen what was drawn and not delivered."""
    assert live(None).resumed().resumed_output == ()


def test_losses_that_no_request_may_have_caused_do_not_count() -> None:
    made = live(None)
    assert all(made.survives(crashed=False) for _ in range(3 * MAX_CRASHES))
    assert [made.survives() for _ in range(MAX_CRASHES)] == [True] * (MAX_CRASHES - 1) + [False]
