"""Enumeration instead of sampling: draws that branch over every outcome, each with its exact probability.

A random program runs once per path through its choices. ``BranchTrace`` replays a prefix of choices, takes the first
option at every new choice, and records the other options. Runs of the recorded options visit the whole tree. No number
between 0 and 1 is drawn: a ``Uniform`` holds the interval that earlier comparisons left open, and each comparison is a
choice. The result is the output distribution in double precision, without sampling error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np

from cospec.rng.random_streams import Floats, StreamKey, StreamKind, exponential_sample

OutputDistribution = dict[Hashable, float]
OutputT = TypeVar("OutputT", bound=Hashable)


class Unsound(BaseException):
    """The enumeration is invalid for the program. No ``except Exception`` of the program may hide this error."""


@dataclass
class BranchTrace:
    """One run: the choices to repeat, the choices made, and the options left for later runs."""

    forced: tuple[int, ...] = ()
    taken: list[int] = field(default_factory=list)
    probability: float = 1.0
    left: list[tuple[int, ...]] = field(default_factory=list)
    used: set[Hashable] = field(default_factory=set)
    shared: dict[Hashable, Uniform] = field(default_factory=dict)  # by key, see ``SharedRandom``

    def choose(self, probabilities: Sequence[float] | Floats) -> int:
        """Return an option of positive probability: the option to repeat, or the first."""
        place = len(self.taken)
        if place < len(self.forced):
            pick = self.forced[place]
        else:
            options = [option for option, p in enumerate(probabilities) if p > 0]
            pick = options[0]
            self.left += [(*self.taken, option) for option in options[1:]]
        self.taken.append(pick)
        self.probability *= float(probabilities[pick])
        return pick

    def use(self, key: Hashable) -> None:
        """Refuse a second use of a key: the enumeration assumes independent decisions."""
        if key in self.used:
            raise Unsound(f"the random key {key} was used twice")
        self.used.add(key)


class Uniform:
    """A uniform number on an interval. Comparisons narrow the interval; each is a choice of ``trace``."""

    __array_ufunc__ = None  # numpy scalars leave comparisons and products to this class

    def __init__(self, trace: BranchTrace) -> None:
        self._trace, self._low, self._high = trace, 0.0, 1.0

    def __lt__(self, bound: float) -> bool:
        bound = min(max(float(bound), self._low), self._high)
        below = (bound - self._low) / (self._high - self._low)
        if self._trace.choose([below, 1.0 - below]) == 0:
            self._high = bound
            return True
        self._low = bound
        return False

    __le__ = __lt__

    def __gt__(self, bound: float) -> bool:
        return not self < bound

    __ge__ = __gt__

    def __mul__(self, factor: float) -> ScaledUniform:
        return ScaledUniform(self, float(factor))

    __rmul__ = __mul__


@dataclass(frozen=True)
class ScaledUniform:
    """``factor`` times a uniform number."""

    uniform: Uniform
    factor: float
    __array_ufunc__ = None

    def __lt__(self, bound: float) -> bool:
        return self.uniform < float(bound) / self.factor if self.factor else float(bound) > 0

    __le__ = __lt__


@dataclass(frozen=True)
class BranchingRandom:
    """Replaces ``cospec.rng.random_streams.RandomStreams``: the same keys, every outcome."""

    trace: BranchTrace
    base: int | tuple[int, ...]  # several numbers if an output is drafted ahead
    by_round: bool = True  # False: keys without the step, as a mutation of the engine

    def uniforms(self, position: int, count: int, kind: StreamKind, branch: int = 0) -> list[Uniform]:
        for place in range(position, position + count):
            self.trace.use(("uniform", *self._key(place, kind, branch)))
        return [Uniform(self.trace) for _ in range(count)]

    def token(self, weights: np.ndarray, position: int, kind: StreamKind, branch: int = 0) -> int:
        assert weights.max() > 0, "no token has a positive weight"
        self.trace.use(("token", *self._key(position, kind, branch)))
        return self.trace.choose(list(weights / weights.sum()))

    def stream(self, position: int, kind: StreamKind, branch: int = 0) -> BranchingStream:
        return self, position, kind, branch

    def _key(self, position: int, kind: StreamKind, branch: int) -> tuple[Hashable, ...]:
        if kind is StreamKind.TARGET:
            return position, kind, 0, 0
        return position, kind, self.base if self.by_round else 0, branch


@dataclass(frozen=True)
class SharedRandom(BranchingRandom):
    """Gives the same number to every reader of a key, as the real generator does."""

    def uniforms(self, position: int, count: int, kind: StreamKind, branch: int = 0) -> list[Uniform]:
        keys = [self._key(place, kind, branch) for place in range(position, position + count)]
        return [self.trace.shared.setdefault(key, Uniform(self.trace)) for key in keys]


BranchingStream = tuple[BranchingRandom, int, StreamKind, int]


def branching_sample(weights: np.ndarray, streams: Sequence[BranchingStream | StreamKey]) -> list[int]:
    """Replaces ``cospec.rng.random_streams.exponential_sample``; streams of the real generator sample as usual."""
    winners = []
    for row, stream in zip(weights, streams, strict=True):
        draws = stream[0]
        if isinstance(draws, BranchingRandom):
            _, position, kind, branch = cast(BranchingStream, stream)
            winners.append(draws.token(row, position, kind, branch))
        else:
            winners += exponential_sample(row[None], [cast(StreamKey, stream)])
    return winners


def enumerate_runs(run: Callable[[BranchTrace], OutputT]) -> dict[OutputT, float]:
    """Return the exact distribution of the results of ``run``."""
    distribution: dict[OutputT, float] = {}
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        trace = BranchTrace(waiting.pop())
        outcome = run(trace)
        distribution[outcome] = distribution.get(outcome, 0.0) + trace.probability
        waiting += trace.left
    return distribution


def total_variation(first: Mapping[OutputT, float], second: Mapping[OutputT, float]) -> float:
    """Return half the absolute difference; probability missing from 1 counts as well."""
    outcomes = first.keys() | second.keys()
    apart = 0.5 * sum(abs(first.get(outcome, 0.0) - second.get(outcome, 0.0)) for outcome in outcomes)
    return apart + abs(1.0 - sum(first.values())) + abs(1.0 - sum(second.values()))
