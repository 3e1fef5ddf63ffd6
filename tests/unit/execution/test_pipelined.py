"""One half of the requests is verified while the drafter drafts for the other half."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from cospec.core.engine import Engine
from cospec.execution.overlapped_base import OverlappedMode
from cospec.models.toy import ToyModel
from harness.in_flight import with_steps_in_flight
from harness.methods import override
from harness.overlap import PARAMS, Recording, engine_under, under
from harness.toys import make_request, toy_engine


def verified_by(made: Engine) -> list[set[str]]:
    """The requests with drafts of each step from now on."""
    found, verifier = list[set[str]](), made.execution_mode.components.verifier
    submit = verifier.submit

    def recorded(entries: Any, drafts: Any) -> Any:
        found.append({entry.sequence.id for entry in entries if entry.sequence.id in drafts})
        return submit(entries, drafts)

    override(verifier, submit=recorded)
    return found


def test_pipelined_drafts_one_half_while_the_other_is_verified() -> None:
    drafter = Recording()
    made = engine_under("pipelined", drafter, 6)
    assert isinstance(made.execution_mode, OverlappedMode)
    verified = verified_by(made)
    for _ in range(5):
        made.step()
        made.execution_mode.check_integrity()
        assert len(made.execution_mode.dispatcher.buffer.ready) <= 3
    assert verified[0] == set(), "the prompts"
    for before, after in pairwise(verified[1:]):
        assert len(before) == len(after) == 3 and not before & after
    assert drafter.batches == [{"r0", "r1", "r2"}, *[set(batch) for batch in verified[2:]], drafter.batches[-1]]


def test_batches_of_different_sizes_become_halves() -> None:
    """One request begins with drafts, and five join: no group of few stays apart while others wait."""
    made = under(toy_engine(ToyModel(4), Recording(), k=2), "pipelined", "slow")
    for n in range(6):
        made.add(make_request(f"r{n}", (n % 4, 1), PARAMS))
        made.step()
    verified = verified_by(made)
    for _ in range(6):
        made.step()
    assert [len(ids) for ids in verified[2:]] == [3] * 4


def test_drafting_during_a_verification_is_time_of_the_next_step() -> None:
    """The drafts of a step were made before; a verifier in this process returns when it has verified."""
    made, found = engine_under("pipelined", Recording(), 6), list[float]()
    assert isinstance(made.execution_mode, OverlappedMode)
    executor, verifier = made.execution_mode.dispatcher.executor, made.execution_mode.components.verifier
    submit = verifier.submit

    def recorded(entries: Any, drafts: Any) -> Any:
        executor.busy += 10.0 ** len(found)  # type: ignore[union-attr]
        return submit(entries, drafts)

    override(verifier, submit=recorded)
    override(made.scheduler.policy, observe=lambda stats, commits: found.append(stats.times.draft))
    for _ in range(5):
        made.step()
    assert found == pytest.approx([0, 1, 10, 100, 1000], abs=0.5)


def test_pipelined_verifies_whole_microbatches_of_steps_in_flight() -> None:
    """Half of a microbatch would occupy a stage nearly as long. Drafts that come late do not divide it either."""
    made = with_steps_in_flight(under(toy_engine(ToyModel(4), Recording(), k=2), "pipelined", "slow"), 2)
    for n in range(8):
        made.add(make_request(f"r{n}", (n % 4, 1), PARAMS))
    verified = verified_by(made)
    for _ in range(6):
        made.step()
    assert verified[:2] == [set(), set()], "the prompts"
    assert {len(ids) for ids in verified[2:]} == {4}
