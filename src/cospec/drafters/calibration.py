"""What a confidence is worth: how often tokens of that confidence were right (spec section 4).

Raw probabilities of different drafters are not comparable: each has its own temperature, training and blind spots, and
even one drafter's own are too sure or too shy. Guesses that could be told right or wrong are counted in bins of their
raw confidence. A bin that saw little still says what the drafter said.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import numpy as np

from cospec.core.rng import Floats

BINS = 16  # even in the square root, so that the many small confidences are told apart; certainty has one more
PRIOR = 8.0  # guesses that the drafter's own word counts for
MOST = 4096.0  # guesses per bin, above which the old ones are halved

CalibrationSample = tuple[float, float]
"""(raw confidence, 1 for a guess that was right or 0; the token's probability where the guess was a distribution)."""


def cells(*shape: int) -> Floats:
    """Room for so many calibrations, ``[*shape, 2, bins]``."""
    return np.zeros((*shape, 2, BINS + 1))


class Calibration:
    """Observed acceptance of one drafter per bin of confidence.

    Args:
        held: ``[2, bins]``, guesses that were right, and all; where somebody else holds them, see ``cells``.
    """

    def __init__(self, held: Floats | None = None) -> None:
        self._hits, self._seen = cells() if held is None else held

    def read(self, raw: float) -> float:
        """The calibrated confidence for a raw one, both 0 to 1."""
        place = int(sqrt(raw) * BINS)
        return (float(self._hits[place]) + PRIOR * raw) / (float(self._seen[place]) + PRIOR)

    def __call__(self, raw: Floats) -> Floats:
        """As ``read``, for an array of any shape."""
        bins = (np.sqrt(raw) * BINS).astype(np.int64)
        return np.asarray((self._hits[bins] + PRIOR * raw) / (self._seen[bins] + PRIOR))

    def learn(self, lessons: Iterable[CalibrationSample]) -> None:
        """Count guesses that the committed tokens have shown to be right or wrong."""
        hits, seen = self._hits, self._seen
        for raw, value in lessons:
            place = int(sqrt(raw) * BINS)
            if seen[place] >= MOST:
                hits[place] /= 2
                seen[place] /= 2
            hits[place] += value
            seen[place] += 1.0
