"""Requests that users give one seed follow their laws all the same, though drafts learn from those before them.

Both requests are enumerated together, and whoever asks for the same numbers gets the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np
import pytest

from cospec.drafters.suffix import SuffixDrafter
from cospec.draws import Purpose
from cospec.engine import requests
from cospec.models.toy import ToyModel
from cospec.params import SamplingParams
from cospec.types import Request, Speculation
from harness.oracle import Law, Trace, Uniform, enumerate_runs, total_variation
from harness.reference import joint_law
from harness.toys import drawing, run_all, tokens_of, toy_engine

EXACT, SEEN = 1e-12, 1e-3
LENGTH = 3  # tokens of each; rounds draft from the second on
FIRST = Request("first", (0, 1, 0), SamplingParams(max_tokens=LENGTH, seed=7), 7)
OTHER_PROMPT = replace(FIRST, id="second", prompt=(1, 2, 0))
OTHER_TEMPERATURE = replace(FIRST, id="second", sampling=replace(FIRST.sampling, temperature=0.6))


@dataclass(frozen=True)
class Numbers:
    """One run's random numbers, each of them known by its key."""

    trace: Trace
    known: dict[tuple[int, ...], Uniform] = field(default_factory=dict)

    def draws(self, seed: int, base: int) -> RememberedDraws:
        return RememberedDraws(self, seed, base)


@dataclass(frozen=True)
class RememberedDraws:
    """Stands in for ``Draws``; a token is where its number falls among the weights."""

    numbers: Numbers
    seed: int
    base: int

    def uniforms(self, position: int, count: int, purpose: Purpose, branch: int = 0) -> list[Uniform]:
        return [self._number(place, purpose, branch, 0) for place in range(position, position + count)]

    def token(self, weights: np.ndarray, position: int, purpose: Purpose, branch: int = 0) -> int:
        number = self._number(position, purpose, branch, 1)
        bounds = np.cumsum(weights / weights.sum())
        below = (token for token, bound in enumerate(bounds[:-1]) if weights[token] > 0 and number < bound)
        return next(below, int(np.flatnonzero(weights)[-1]))

    def stream(self, position: int, purpose: Purpose, branch: int = 0) -> tuple[RememberedDraws, int, Purpose, int]:
        return self, position, purpose, branch

    def _number(self, position: int, purpose: Purpose, branch: int, kind: int) -> Uniform:
        once = (0, 0) if purpose is Purpose.TARGET else (branch, self.base)
        key = (self.seed, purpose, position, *once, kind)
        return self.numbers.known.setdefault(key, Uniform(self.numbers.trace))


def _race(rows: np.ndarray, streams: list[tuple[RememberedDraws, int, Purpose, int]]) -> list[int]:
    return [draws.token(row, *where) for row, (draws, *where) in zip(rows, streams, strict=True)]


def law_of_the_second(rule: str, second: Request) -> Law:
    """Over everything that may happen to the first and to itself."""
    target = ToyModel(3, order=2, seed=1)

    def run(trace: Trace) -> tuple[int, ...]:
        engine = toy_engine(target, SuffixDrafter(), rule, k=2)
        numbers = Numbers(trace)
        with drawing(numbers.draws), patch("cospec.engine.judging.race", _race):  # type: ignore[arg-type]
            for request in (FIRST, second):
                found = tokens_of(run_all(engine, [replace(request, speculation=Speculation(rule=rule))], check=False))
        return found["second"]

    return enumerate_runs(run)


def error(rule: str, second: Request) -> float:
    target = ToyModel(3, order=2, seed=1)
    return total_variation(law_of_the_second(rule, second), joint_law(target, second.sampling, second.prompt, LENGTH))


@pytest.mark.parametrize("second", [OTHER_PROMPT, OTHER_TEMPERATURE], ids=["prompt", "temperature"])
@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_the_second_of_two_requests_with_one_seed_follows_its_law(rule: str, second: Request) -> None:
    assert error(rule, second) < EXACT


@pytest.mark.parametrize("second", [OTHER_PROMPT, OTHER_TEMPERATURE], ids=["prompt", "temperature"])
def test_shared_numbers_would_be_seen(second: Request) -> None:
    with patch.object(requests, "own_seed", lambda request: request.seed):
        assert error("rejection", second) > SEEN


@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_a_request_that_is_made_again_alone_writes_the_same(rule: str) -> None:
    """However much of it is wanted, but for the drafts that its end cuts, and whatever is told of it beside."""
    found = []
    for more in ({}, {}, {"logprobs": 2}, {"max_tokens": 60}, {"stop": ()}):
        params = SamplingParams(**{"max_tokens": 40, "seed": 7, **more})  # type: ignore[arg-type]
        request = replace(FIRST, sampling=params, speculation=Speculation(rule=rule))
        engine = toy_engine(ToyModel(3, order=2, seed=1), SuffixDrafter(), rule, k=2)
        found.append(tokens_of(run_all(engine, [request]))["first"][:30])
    assert len(set(found)) == 1


def test_which_requests_have_numbers_of_their_own() -> None:
    """Those that are drafted for under a rule that tests drawn drafts; the others' text is that of their seed."""
    resolve = toy_engine(ToyModel(3, order=2, seed=1), SuffixDrafter()).parts.resolver.resolve

    def seed(request: Request, **chosen: object) -> int:
        return resolve(replace(request, speculation=Speculation(**chosen))).seed  # type: ignore[arg-type]

    seeds = {seed(request, rule="block") for request in (FIRST, OTHER_PROMPT, OTHER_TEMPERATURE)}
    seeds |= {seed(FIRST, rule="rejection"), seed(FIRST, rule="block", length=2)}
    assert len(seeds) == 5
    assert FIRST.seed not in seeds
    unseeded = replace(FIRST, sampling=replace(FIRST.sampling, seed=None))
    for same in (seed(FIRST), seed(FIRST, rule="block", enabled=False), seed(unseeded, rule="block")):
        assert same == FIRST.seed
