"""The enumeration of the user's pool: right pools pass, and a combiner or routing that cheats is seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from cospec.config import SpeculativeConfig
from cospec.core.types import Draft, DraftContext
from cospec.drafters.pool.combiners.combiner import CombineTask
from cospec.drafters.pool.combiners.mix import Mix
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.options import PoolOptions
from cospec.drafters.pool.routing.all import AllDrafters
from cospec.drafters.pool.routing.drafter_weights import DrafterWeights
from cospec.drafters.pool.routing.routing import Routing, RoutingInput
from cospec.registry import ACCEPTANCE_METHODS, COMBINERS, ROUTINGS
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind
from cospec.verify.enumerated_draws import Unsound
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


class ByChance(AllDrafters):
    """Chooses one drafter by a random number of its own."""

    name: ClassVar[str] = "by chance"
    kind: ClassVar[StreamKind] = StreamKind.ROUTE

    def draws(self, choice: RoutingInput) -> RandomStreams:
        return choice.draws

    def route(self, weights: DrafterWeights, choice: RoutingInput) -> list[int]:
        (number,) = self.draws(choice).uniforms(choice.base, 1, self.kind)
        return [choice.able[0 if number < 0.5 else -1]]


class ByAcceptance(ByChance):
    """Chooses by the number that accepts the first draft token."""

    kind: ClassVar[StreamKind] = StreamKind.ACCEPT


class BySeed(ByAcceptance):
    """Makes this number itself."""

    def draws(self, choice: RoutingInput) -> RandomStreams:
        return RandomStreams(choice.seed, choice.base)


@pytest.fixture
def routing(request: pytest.FixtureRequest) -> Iterator[str]:
    made: type[Routing] = request.param
    ROUTINGS.register(made.name, made)
    yield made.name
    ROUTINGS.unregister(made.name)


@pytest.mark.parametrize("routing", [ByChance], indirect=True)
@pytest.mark.parametrize(("combiner", "method"), [("mix", "block"), ("mix", "rejection"), ("fuse", "match")])
def test_a_routing_by_numbers_of_its_own_is_exact(routing: str, combiner: str, method: str) -> None:
    assert error(options(combiner, routing), method, toy_target(words=WORDS), LENGTH) < EXACT


@pytest.mark.parametrize("routing", [ByAcceptance], indirect=True)
@pytest.mark.parametrize("method", ["block", "rejection"])
def test_a_routing_by_the_numbers_of_the_acceptance_is_caught(routing: str, method: str) -> None:
    assert error(options("mix", routing), method, toy_target(words=WORDS), LENGTH) > SEEN


@pytest.mark.parametrize("routing", [BySeed], indirect=True)
def test_a_routing_that_makes_numbers_from_the_seed_is_refused(routing: str) -> None:
    with pytest.raises(Unsound, match="a routing made random numbers from the seed"):
        error(options("mix", routing), "block", toy_target(words=WORDS), LENGTH)


def test_only_a_pool_has_options() -> None:
    assert pool_options(SpeculativeConfig(method="off")) is None
    assert pool_options(SpeculativeConfig(method="ngram")) is None
    found = pool_options(SpeculativeConfig(method="pool", options={"combiner": "vote"}))
    assert found is not None and found.combiner == "vote"
