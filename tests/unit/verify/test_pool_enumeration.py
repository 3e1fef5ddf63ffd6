"""The enumeration of the user's pool: right pools pass, and a combiner or routing that cheats is seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from cospec.config import SpeculativeConfig
from cospec.core.rng import Floats
from cospec.core.types import Draft, DraftContext
from cospec.drafters.pool.combiners.combiner import CombineTask
from cospec.drafters.pool.combiners.mix import Mix
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.options import PoolOptions
from cospec.registry import ACCEPTANCE_METHODS, COMBINERS, ROUTINGS
from cospec.verify.enumeration import EXACT, SEEN, toy_target
from cospec.verify.pool_enumeration import LENGTH, WORDS, error, pool_options

PAIRS = [
    (combiner, method)
    for combiner in COMBINERS
    for method in ACCEPTANCE_METHODS
    if ACCEPTANCE_METHODS.load(method).exact
    and ACCEPTANCE_METHODS.load(method).stream_kind in COMBINERS.load(combiner).stream_kinds
]


def options(combiner: str, routing: str = "hedge", count: int = 2, at_most: int | None = None) -> PoolOptions:
    members = [{"name": f"d{place}", "method": "ngram"} for place in range(count)]
    return PoolOptions(combiner=combiner, routing=routing, drafters=members, at_most=at_most)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("combiner", "method"), PAIRS)
def test_every_pool_is_exact(combiner: str, method: str, routing: str) -> None:
    for count, at_most in ((2, None), (3, 1)):
        assert error(options(combiner, routing, count, at_most), method, toy_target(words=WORDS), LENGTH) < EXACT


def test_a_pool_that_drafts_for_an_ensemble_is_exact() -> None:
    target = toy_target(2, {"method": "weighted", "lambda": 0.5}, WORDS)
    assert error(options("fuse"), "match", target, LENGTH) < EXACT


class LikelierOfTwo(Mix):
    """Draws twice and keeps the likelier token, and reports the distribution of one draw."""

    name: ClassVar[str] = "likelier of two"

    def combine(self, tasks: Sequence[CombineTask], session: LockstepSession, names: Sequence[str]) -> list[Draft]:
        once = session.draw

        def twice(weights: Floats, contexts: Sequence[DraftContext], ahead: Sequence[int]) -> list[int]:
            # A second draw at another place has a key of its own.
            draws = once(weights, contexts, ahead), once(weights, contexts, [places + 64 for places in ahead])
            return [max(pair, key=lambda token: row[token]) for row, *pair in zip(weights, *draws, strict=True)]

        return super().combine(tasks, replace(session, draw=twice), names)


@pytest.fixture
def likelier() -> Iterator[None]:
    COMBINERS.register(LikelierOfTwo.name, LikelierOfTwo)
    yield
    COMBINERS.unregister(LikelierOfTwo.name)


@pytest.mark.usefixtures("likelier")
@pytest.mark.parametrize("method", ["block", "rejection"])
def test_a_combiner_that_compares_its_draws_is_caught(method: str) -> None:
    assert error(options(LikelierOfTwo.name), method, toy_target(words=WORDS), LENGTH) > SEEN


@pytest.mark.usefixtures("likelier")
def test_match_keeps_the_distribution_for_every_draft() -> None:
    assert error(options(LikelierOfTwo.name), "match", toy_target(words=WORDS), LENGTH) < EXACT


def test_only_a_pool_has_options() -> None:
    assert pool_options(SpeculativeConfig(method="off")) is None
    assert pool_options(SpeculativeConfig(method="ngram")) is None
    found = pool_options(SpeculativeConfig(method="pool", options={"combiner": "vote"}))
    assert found is not None and found.combiner == "vote"
