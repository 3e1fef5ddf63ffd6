"""Enumeration instead of sampling: draws that branch over every outcome, each with its exact probability.

A program that draws is run once per path through its choices. ``Trace`` replays a prefix of choices, takes the first
option at every new one, and remembers the options it left out; running those in turn visits the whole tree. Numbers
between 0 and 1 are never drawn: a ``Uniform`` knows only the interval that its comparisons have left open, and each
comparison is a choice. So the law of the program's output comes out in double precision, with no sampling error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np

from cospec.core.rng import Floats, Stream, StreamKind, exponential_sample

OutputDistribution = dict[Hashable, float]
OutputT = TypeVar("OutputT", bound=Hashable)


class Unsound(BaseException):
    """The enumeration does not hold for the program. No ``except Exception`` of the program may hide that."""


@dataclass
class Trace:
    """One run: the choices it must repeat, those it made, and those it left for later runs."""

    forced: tuple[int, ...] = ()
    taken: list[int] = field(default_factory=list)
    probability: float = 1.0
    left: list[tuple[int, ...]] = field(default_factory=list)
    used: set[Hashable] = field(default_factory=set)

    def choose(self, probabilities: Sequence[float] | Floats) -> int:
        """An option with a positive probability: the one to repeat, or the first."""
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
        """The same noise twice would tie two decisions together, which the enumeration takes to be independent."""
        if key in self.used:
            raise Unsound(f"the noise {key} was used twice")
        self.used.add(key)


class Uniform:
    """A number uniform on an interval that comparisons narrow, each of them a choice of ``trace``."""

    __array_ufunc__ = None  # numpy scalars leave comparisons and products to this class

    def __init__(self, trace: Trace) -> None:
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

    def __mul__(self, factor: float) -> Scaled:
        return Scaled(self, float(factor))

    __rmul__ = __mul__


@dataclass(frozen=True)
class Scaled:
    """``factor`` times a uniform number."""

    uniform: Uniform
    factor: float
    __array_ufunc__ = None

    def __lt__(self, bound: float) -> bool:
        return self.uniform < float(bound) / self.factor if self.factor else float(bound) > 0

    __le__ = __lt__


@dataclass(frozen=True)
class BranchingRandom:
    """Stands in for ``cospec.core.rng.RandomStreams``: the same keys, every outcome."""

    trace: Trace
    base: int | tuple[int, ...]  # several numbers where an output is drafted ahead
    by_round: bool = True  # False: the keys forget the round, as a mutation

    def uniforms(self, position: int, count: int, purpose: StreamKind, branch: int = 0) -> list[Uniform]:
        for place in range(position, position + count):
            self.trace.use(("uniform", *self._key(place, purpose, branch)))
        return [Uniform(self.trace) for _ in range(count)]

    def token(self, weights: np.ndarray, position: int, purpose: StreamKind, branch: int = 0) -> int:
        assert weights.max() > 0, "no token has a positive weight"
        self.trace.use(("token", *self._key(position, purpose, branch)))
        return self.trace.choose(list(weights / weights.sum()))

    def stream(self, position: int, purpose: StreamKind, branch: int = 0) -> BranchingStream:
        return self, position, purpose, branch

    def _key(self, position: int, purpose: StreamKind, branch: int) -> tuple[Hashable, ...]:
        if purpose is StreamKind.TARGET:
            return position, purpose, 0, 0
        return position, purpose, self.base if self.by_round else 0, branch


BranchingStream = tuple[BranchingRandom, int, StreamKind, int]


def branching_sample(weights: np.ndarray, streams: Sequence[BranchingStream | Stream]) -> list[int]:
    """Stands in for ``cospec.core.rng.exponential_sample``; streams of the real generator race as they do."""
    winners = []
    for row, stream in zip(weights, streams, strict=True):
        draws = stream[0]
        if isinstance(draws, BranchingRandom):
            _, position, purpose, branch = cast(BranchingStream, stream)
            winners.append(draws.token(row, position, purpose, branch))
        else:
            winners += exponential_sample(row[None], [cast(Stream, stream)])
    return winners


def enumerate_runs(run: Callable[[Trace], OutputT]) -> dict[OutputT, float]:
    """The exact law of what ``run`` returns."""
    distribution: dict[OutputT, float] = {}
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        trace = Trace(waiting.pop())
        outcome = run(trace)
        distribution[outcome] = distribution.get(outcome, 0.0) + trace.probability
        waiting += trace.left
    return distribution


def total_variation(first: Mapping[OutputT, float], second: Mapping[OutputT, float]) -> float:
    """Half the absolute difference, with whatever mass is missing from 1 counted as well."""
    outcomes = first.keys() | second.keys()
    apart = 0.5 * sum(abs(first.get(outcome, 0.0) - second.get(outcome, 0.0)) for outcome in outcomes)
    return apart + abs(1.0 - sum(first.values())) + abs(1.0 - sum(second.values()))
