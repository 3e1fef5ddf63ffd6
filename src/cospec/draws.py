"""The one place that draws random numbers.

Every draw is a function of (seed, position, purpose): a counter-based generator (Philox) keyed by seed and purpose
and set to the position. So a draw does not depend on batch, drafter, speculation length or on which draws were made
before it. Tokens are drawn by an exponential race, the Gumbel-max trick without its second logarithm: with
``E_i ~ Exp(1)``, ``argmin E_i / p_i`` follows ``p``. A drafter that races with the same noise as the target picks the
target's token whenever their distributions are close.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TO_UNIT = 2.0**-53
_HALF_STEP = 2.0**-54
_WORD = 2**64
_BLOCK = 4  # words per count of the generator


class Purpose(IntEnum):
    """What a random draw is for. Each purpose is an independent stream."""

    TARGET = 0  # a token from the law; also the drafter's noise under ``match``
    DRAFT = 1  # a drafter's own token
    ACCEPT = 2  # the uniform number that a draft token is tested with
    RECOVER = 3  # the token drawn from a residual after a rejection


def _words(seed: int, stream: int, counter: tuple[int, int], count: int) -> NDArray[np.uint64]:
    """``[count]`` raw words from (low, high) ``counter`` on."""
    key = np.array([seed % _WORD, stream], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=np.array([counter[0], 0, counter[1], 0], dtype=np.uint64)).random_raw(count)
    return np.asarray(words, dtype=np.uint64)


def _unit(words: NDArray[np.uint64]) -> Floats:
    """Words to numbers strictly between 0 and 1, 53 bits each."""
    return np.asarray((words >> np.uint64(11)) * _TO_UNIT + _HALF_STEP, dtype=np.float64)


def derive(seed: int, index: int) -> int:
    """The seed of the ``index``-th of several outputs of one request; output 0 keeps the seed itself."""
    return seed % _WORD if index == 0 else int(_words(seed, _WORD - 1, (0, index), 1)[0])


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of one sequence. Positions count the tokens of the sequence, prompt included, from 0."""

    seed: int

    def uniforms(self, position: int, count: int, purpose: Purpose) -> Floats:
        """``[count]`` numbers strictly between 0 and 1: one for each position from ``position`` on."""
        return _unit(_words(self.seed, purpose, (position, 0), count * _BLOCK)[::_BLOCK])

    def token(self, weights: Floats, position: int, purpose: Purpose) -> int:
        """A token id drawn with probability proportional to ``weights [V]``, which need not sum to one.

        Raises:
            ValueError: no weight is positive.
        """
        if not weights.max() > 0:
            raise ValueError("no token has a positive weight, so none can be drawn")
        race = -np.log(_unit(_words(self.seed, purpose, (0, position), len(weights))))
        return int(np.argmax(weights / race))
