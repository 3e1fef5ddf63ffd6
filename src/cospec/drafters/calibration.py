"""What a confidence is worth: how often nodes of that confidence were accepted (spec section 4).

Raw probabilities of different drafters are not comparable, and even one drafter's own are too sure or too shy. Nodes
are counted in bins of their raw confidence. A bin that saw little still says what the drafter said.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cospec.draws import Floats

BINS = 16
PRIOR = 8.0  # nodes that the drafter's own word counts for
FADE = 0.5 ** (1 / 4096)  # per node seen: after 4096 nodes the memory of one is halved


class Calibration:
    """Observed acceptance per bin of confidence, forgetting slowly."""

    def __init__(self) -> None:
        self._seen, self._accepted = np.zeros(BINS), np.zeros(BINS)

    def __call__(self, raw: Floats) -> Floats:
        """Confidences of any shape to acceptance rates of the same shape, 0 to 1."""
        bins = _bins(raw)
        return np.asarray((self._accepted[bins] + PRIOR * raw) / (self._seen[bins] + PRIOR))

    def observe(self, raw: Floats, accepted: NDArray[np.bool_]) -> None:
        """Learn from nodes whose parent was accepted; ``[n]`` each."""
        if not len(raw):
            return
        fade = FADE ** len(raw)
        bins = _bins(raw)
        self._seen = self._seen * fade + np.bincount(bins, minlength=BINS)
        self._accepted = self._accepted * fade + np.bincount(bins, weights=accepted, minlength=BINS)


def _bins(raw: Floats) -> NDArray[np.int64]:
    """Even in the square root, so that the many small confidences are told apart."""
    return np.minimum((np.sqrt(raw) * BINS).astype(np.int64), BINS - 1)
