"""What drafting takes in the end, beside what its parts say.

Drafts leave the processor's caches to the drafter, take another way through a forward pass, have to be judged, and
every text is read once more; where they just pay, that decides whether they do. So rounds with drafts and rounds
without are each compared with their predictions. What the two are off by together is the machine's speed; what they
differ by is this. Of rounds that are not run the evidence fades, and in the end they are believed, and tried, again.
"""

from __future__ import annotations

import numpy as np

from cospec.policies.cost import Floats

KEPT, UNSEEN = 0.99, 0.999  # weight of what is known of a kind of round, per round of that kind and of the other
TRUST = 4.0  # rounds of a kind that its prediction counts for
ODD = 3.0  # times the prediction that a disturbed round counts for at most
MOST = 0.6  # of a round without drafts that this may be


class Reckoning:
    """Follows the rounds.

    Attributes:
        share: of what is predicted of a round without drafts, that is saved where nothing is drafted.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._sums = np.zeros((2, 3))  # without drafts and with them: measured, predicted, rounds

    def follow(self, drafted: Floats, seconds: Floats, predicted: Floats, weights: Floats) -> None:
        """Learn from rounds ``[S]``: whether they had drafts, seconds, and how many rounds each counts for."""
        for kind in (0, 1):
            own = drafted == kind
            told = weights[own]
            keep = KEPT ** float(told.sum()) * UNSEEN ** float((~own).sum())
            seen = np.minimum(seconds[own], ODD * predicted[own])
            self._sums[kind] = keep * self._sums[kind] + [told @ seen, told @ predicted[own], told.sum()]
        least = float(self._sums[:, 2].min())
        if least:
            without, beside = self._sums[:, 0] / self._sums[:, 1]
            self.share = float(np.clip(least / (least + TRUST) * (1.0 - without / beside), -MOST, MOST))
