"""Acceptance by the level of a draft and by the number of siblings there, relative to the requests' own rates.

Under independence, a level of w siblings is accepted with probability h = 1 − (1 − α)^w, given the level before. Drafts
deviate: later positions are harder for heads, and a second choice is worse than the first. For each level and w, this
estimator compares accepted levels with the sum of h over the requests, so a mixture of easy and hard requests does not
look like an effect of the level. The difference, as log-odds, is added to h. Counts without observations mean no
difference. A level without observations of some w takes the difference of all levels with this w.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVELS, WIDEST = 8, 4  # deeper levels share the last entry; wider levels too
DECAY = 0.9995  # weight of the past, per step with verified drafts
WEIGHT = 32.0  # levels that independence counts for
CLIP = 1e-4  # bound of probabilities whose log-odds are taken
MOVED = 0.1  # change of log-odds, root mean square by observations, that calls for new shapes

Fate = tuple[tuple[int, ...], int, int]
"""Widths of a draft (empty: a chain), accepted levels, and 1 if the next level was rejected, else 0.

The requests' rates must be those of first siblings (``Commit.ranks``); otherwise effects of siblings look like rates.
"""


def independent(rates: Floats) -> Floats:
    """Return the acceptance of levels of 1 to ``WIDEST`` siblings at acceptance rates ``[n]``, as ``[n, WIDEST]``."""
    return np.asarray(1.0 - (1.0 - rates[:, None]) ** np.arange(1, WIDEST + 1))


class LevelRates:
    """Counts and log-odds by level and width.

    Args:
        by_level: each level has log-odds of its own; False: all levels with w siblings share log-odds.
        by_width: siblings have log-odds; False: only chains are observed.
    """

    def __init__(self, by_level: bool, by_width: bool) -> None:
        self.active = by_level or by_width
        self._by_level, self._by_width = by_level, by_width
        self._counts = np.zeros((3, LEVELS, WIDEST))  # accepted, verified, expected to be accepted
        self._read = np.zeros((LEVELS, WIDEST))  # log-odds of the latest ``acceptance``
        self.moved = False  # ``acceptance`` would differ much from its latest result

    def observe(self, fates: Mapping[Fate, Sequence[float]], steps: int) -> None:
        """Count verified levels of ``steps`` steps.

        Args:
            fates: by fate, the number of drafts and the sum of their requests' acceptance rates.
        """
        accepted, verified, expected = ([0.0] * (LEVELS * WIDEST) for _ in range(3))
        for (widths, kept, rejected), (number, rates) in fates.items():
            if widths and not self._by_width:
                continue
            missed = 1.0 - rates / number
            for level in range(kept + rejected):
                width = min(widths[level], WIDEST) if level < len(widths) else 1
                cell = min(level, LEVELS - 1) * WIDEST + width - 1
                verified[cell] += number
                expected[cell] += number * (1.0 - missed**width)
                if level < kept:
                    accepted[cell] += number
        new = np.array([accepted, verified, expected]).reshape(self._counts.shape)
        self._counts = DECAY**steps * self._counts + new
        weights, change = self._counts[1], (self._shifts() - self._read) ** 2
        self.moved = bool((weights * change).sum() > MOVED**2 * max(weights.sum(), WEIGHT))

    def acceptance(self, rates: Floats) -> Floats:
        """Return the acceptance of levels after accepted levels, ``[n, LEVELS, WIDEST]``, at rates ``[n]``."""
        self._read, self.moved = self._shifts(), False
        return _chance(_odds(independent(rates))[:, None] + self._read)

    def _shifts(self) -> Floats:
        """Return the log-odds, ``[LEVELS, WIDEST]``."""
        if not self.active:
            return np.zeros((LEVELS, WIDEST))
        together = [_difference(each, 0.0) for each in self._counts.sum(1).T.tolist()]
        if not self._by_level:
            return np.broadcast_to(together, (LEVELS, WIDEST))
        cells = self._counts.transpose(1, 2, 0).tolist()
        return np.array([[_difference(*each) for each in zip(level, together, strict=True)] for level in cells])


def _difference(counts: Sequence[float], usual: float) -> float:
    """Return observed minus expected log-odds of ``counts [3]``, shrunk towards the ``usual`` difference.

    Most cells have no observation, so scalars take less time than arrays.
    """
    accepted, verified, expected = counts
    if not verified:
        return usual
    share = min(max(expected / verified, CLIP), 1.0 - CLIP)
    odds = math.log(share / (1.0 - share))
    prior = 1.0 / (1.0 + math.exp(-odds - usual))
    chance = min(max((accepted + WEIGHT * prior) / (verified + WEIGHT), CLIP), 1.0 - CLIP)
    return math.log(chance / (1.0 - chance)) - odds


def _odds(chance: Floats) -> Floats:
    """Return log-odds."""
    bounded = np.minimum(np.maximum(chance, CLIP), 1.0 - CLIP)
    return np.asarray(np.log(bounded / (1.0 - bounded)))


def _chance(odds: Floats) -> Floats:
    """Return probabilities."""
    return np.asarray(1.0 / (1.0 + np.exp(-odds)))
