"""The one place that draws random numbers; ``rng/torch_draws.py`` makes the same draws in tensor operations.

Every draw is a function of seed, kind and position. For all kinds except ``TARGET`` a draw is also a function of the
branch and of the number of committed tokens at the start of the step. A counter-based generator (Philox) has seed and
kind as key, and the position as counter. So a draw depends neither on the batch nor on earlier draws. Draws of
``TARGET`` do not depend on drafter or draft length either.

The other kinds need fresh numbers in every step. An acceptance method may read all of a draft before a part is
accepted (block verification). Numbers that rejected a token must not decide on the next token at the same position. The
other kinds need fresh numbers in every branch too, because all nodes of one depth of a tree share a position.

Tokens are drawn by an exponential race, the Gumbel-max trick without its second logarithm: with ``E_i ~ Exp(1)``,
``argmin E_i / p_i`` follows ``p``. A drafter that races with the noise of the target often draws the target's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cospec.native import library

Floats = NDArray[np.float64]
StreamKey = tuple[int, int, int, int, int, int]  # the generator's key (two words) and counter (four)

_TO_UNIT = 2.0**-52
_HALF_STEP = 2.0**-53
_WORD = 2**64
_BLOCK = 4  # words per count of the generator


class StreamKind(IntEnum):
    """What a random draw is for. Each kind is an independent stream."""

    TARGET = 0  # a token from the target distribution; also the drafter's noise under ``match``. The same in every step
    DRAFT = 1  # a drafter's own token
    ACCEPT = 2  # the uniform number that a draft token is tested with
    RECOVER = 3  # the token drawn from a residual after a rejection
    ROUTE = 4  # which drafters of a pool work for a sequence


def random_words(seed: int, stream: int, counter: tuple[int, int, int, int], count: int) -> NDArray[np.uint64]:
    """``[count]`` raw words from ``counter`` on, whose first member counts them in blocks."""
    key = np.array([seed % _WORD, stream], dtype=np.uint64)
    start = np.array(counter, dtype=np.uint64)
    return np.asarray(np.random.Philox(key=key, counter=start).random_raw(count), dtype=np.uint64)


def to_unit_interval(words: NDArray[np.uint64]) -> Floats:
    """Words to numbers strictly between 0 and 1: odd multiples of 2^-53, so that none is rounded to a bound."""
    return np.asarray((words >> np.uint64(12)) * _TO_UNIT + _HALF_STEP, dtype=np.float64)


def derive_seed(seed: int, index: int) -> int:
    """The seed of the ``index``-th of several outputs of one request; output 0 keeps the seed itself."""
    return seed % _WORD if index == 0 else int(random_words(seed, _WORD - 1, (0, 0, index, 0), 1)[0])


def exponential_sample(weights: Floats, streams: Sequence[StreamKey]) -> list[int]:
    """The winner of each row's exponential race, -1 where no weight is positive.

    Args:
        weights: ``[R, V]``; row ``r`` is drawn from with ``streams[r]``, see ``RandomStreams.stream``.
    """
    if library.available():
        return library.sample_rows(weights, streams)
    winners = []
    for row, stream in zip(weights, streams, strict=True):
        winners.append(int(np.argmax(row / exponentials(stream, len(row)))) if row.max() > 0 else -1)
    return winners


def exponentials(stream: StreamKey, count: int) -> Floats:
    """``[count]`` exponential numbers, one per token; a race divides the weights by these numbers."""
    seed, kind, low, branch, position, base = stream
    return np.asarray(-np.log(to_unit_interval(random_words(seed, kind, (low, branch, position, base), count))))


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The draws of one sequence in one step. Positions count the tokens of the sequence, prompt included, from 0.

    Attributes:
        base: committed tokens when the step began, which no two steps of a sequence share.

    ``branch`` separates draws of one kind at one position.
    """

    seed: int
    base: int

    def uniforms(self, position: int, count: int, kind: StreamKind, branch: int = 0) -> Floats:
        """Return ``[count]`` numbers strictly between 0 and 1: one for each position from ``position`` on."""
        word, base = self._key(kind, branch)
        return to_unit_interval(random_words(self.seed, kind, (position, word, 0, base), count * _BLOCK)[::_BLOCK])

    def stream(self, position: int, kind: StreamKind, branch: int = 0) -> StreamKey:
        """Return the key of the random numbers for a token at ``position``."""
        word, base = self._key(kind, branch)
        return self.seed % _WORD, kind, 0, word, position, base

    def token(self, weights: Floats, position: int, kind: StreamKind, branch: int = 0) -> int:
        """Return a token id drawn with probability proportional to ``weights [V]``, which need not sum to one.

        Raises:
            ValueError: no weight is positive.
        """
        (winner,) = exponential_sample(weights[None], [self.stream(position, kind, branch)])
        if winner < 0:
            raise ValueError("no token has a positive weight, so none can be drawn")
        return winner

    def _key(self, kind: StreamKind, branch: int) -> tuple[int, int]:
        """Return branch and ``base``; the ``TARGET`` stream uses neither."""
        return (0, 0) if kind is StreamKind.TARGET else (branch, self.base)
