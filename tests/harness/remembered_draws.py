"""Random numbers of enumerated runs, each known by its key: who asks for the same number gets the same one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np

from cospec.rng.random_streams import StreamKind
from harness.enumerated_draws import BranchTrace, Uniform
from harness.toys import drawing


@dataclass(frozen=True)
class Numbers:
    """One run's random numbers, each of them known by its key."""

    trace: BranchTrace
    known: dict[tuple[int, ...], Uniform] = field(default_factory=dict)

    def draws(self, seed: int, base: int) -> RememberedDraws:
        return RememberedDraws(self, seed, base)


@dataclass(frozen=True)
class RememberedDraws:
    """Stands in for ``RandomStreams``; a token is where its number falls among the weights."""

    numbers: Numbers
    seed: int
    base: int

    def uniforms(self, position: int, count: int, stream_kind: StreamKind, branch: int = 0) -> list[Uniform]:
        return [self._number(place, stream_kind, branch, 0) for place in range(position, position + count)]

    def token(self, weights: np.ndarray, position: int, stream_kind: StreamKind, branch: int = 0) -> int:
        number = self._number(position, stream_kind, branch, 1)
        bounds = np.cumsum(weights / weights.sum())
        below = (token for token, bound in enumerate(bounds[:-1]) if weights[token] > 0 and number < bound)
        return next(below, int(np.flatnonzero(weights)[-1]))

    def stream(
        self, position: int, stream_kind: StreamKind, branch: int = 0
    ) -> tuple[RememberedDraws, int, StreamKind, int]:
        return self, position, stream_kind, branch

    def _number(self, position: int, stream_kind: StreamKind, branch: int, kind: int) -> Uniform:
        once = (0, 0) if stream_kind is StreamKind.TARGET else (branch, self.base)
        key = (self.seed, stream_kind, position, *once, kind)
        return self.numbers.known.setdefault(key, Uniform(self.numbers.trace))


def race(rows: np.ndarray, streams: list[tuple[RememberedDraws, int, StreamKind, int]]) -> list[int]:
    return [stream[0].token(row, *stream[1:]) for row, stream in zip(rows, streams, strict=True)]


@contextmanager
def remembered(numbers: Numbers) -> Iterator[None]:
    """Draw the numbers of a run."""
    with drawing(numbers.draws), patch("cospec.acceptance.python_verification.exponential_sample", race):
        yield
