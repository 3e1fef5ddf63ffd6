"""Calibrate confidences: how often tokens of a raw confidence were right.

Raw probabilities of different drafters are not comparable: temperature, training and weaknesses differ. Even one
drafter's own probabilities may be too high or too low. Verifiable guesses are counted in bins of their raw confidence.
A bin with few guesses follows the drafter's own probability.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import numpy as np

from cospec.rng.random_streams import Floats

BINS = 16  # even in the square root, which separates the many small confidences; certainty has one more
PRIOR = 8.0  # guesses that the drafter's own probability counts for
MOST = 4096.0  # guesses per bin above which old guesses are halved

CalibrationSample = tuple[float, float]
"""(raw confidence, result): the result is 1 for a right guess, 0 for a wrong guess, or the token's probability where
the guess was a distribution.
"""


def cells(*shape: int) -> Floats:
    """Return storage for calibrations, ``[*shape, 2, bins]``."""
    return np.zeros((*shape, 2, BINS + 1))


class Calibration:
    """Observed acceptance of one drafter per bin of confidence.

    Args:
        held: ``[2, bins]``, right guesses and all guesses; external storage, see ``cells``.
    """

    def __init__(self, held: Floats | None = None) -> None:
        self._held = cells() if held is None else held
        self._hits, self._seen = _numbers(self._held[0]), _numbers(self._held[1])

    def read(self, raw: float) -> float:
        """Return the calibrated confidence of a raw confidence, both from 0 to 1."""
        place = int(sqrt(raw) * BINS)
        return (self._hits[place] + PRIOR * raw) / (self._seen[place] + PRIOR)

    def __call__(self, raw: Floats) -> Floats:
        """Calibrate an array of any shape, as ``read``."""
        bins = (np.sqrt(raw) * BINS).astype(np.int64)
        hits, seen = self._held
        return np.asarray((hits[bins] + PRIOR * raw) / (seen[bins] + PRIOR))

    def learn(self, samples: Iterable[CalibrationSample]) -> None:
        """Count guesses that the committed tokens have verified."""
        hits, seen = self._hits, self._seen
        for raw, value in samples:
            place = int(sqrt(raw) * BINS)
            if seen[place] >= MOST:
                hits[place] /= 2
                seen[place] /= 2
            hits[place] += value
            seen[place] += 1.0


def _numbers(values: Floats) -> memoryview[float]:
    """Return the same storage; numpy reads and writes single numbers slowly."""
    return values.data.cast("B").cast("d")
