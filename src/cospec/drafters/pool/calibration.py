"""How often a drafter is right when it is so confident: observed acceptance per bin (spec section 4).

Raw probabilities of different drafters are not comparable: each has its own temperature, training and blind spots. Per
drafter, and apart for greedy and drawing requests, the guesses that could be told right or wrong are counted by their
raw confidence. An empty bin trusts the raw value. Plain lists: a pool reads one number at a time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cospec.drafters.routing.choice import Lesson

BINS = 16
PRIOR_GUESSES = 8.0  # how many observations the raw confidence itself is worth
MOST = 4096.0  # observations per bin, above which the old ones are halved
EDGE = 0.01  # no confidence is nearer to 0 or 1
MOST_SURE = 1.0 - EDGE


class Calibration:
    """Of all drafters of a pool, by number."""

    def __init__(self, members: int) -> None:
        self._hits = [[[0.0] * BINS for _ in range(2)] for _ in range(members)]
        self._seen = [[[0.0] * BINS for _ in range(2)] for _ in range(members)]

    def read(self, member: int, greedy: bool, raw: float) -> float:
        """The calibrated confidence for a raw one, both 0 to 1."""
        place = min(int(raw * BINS), BINS - 1)
        hits, seen = self._hits[member][greedy][place], self._seen[member][greedy][place]
        rate = (hits + PRIOR_GUESSES * raw) / (seen + PRIOR_GUESSES)
        return EDGE if rate < EDGE else MOST_SURE if rate > MOST_SURE else rate

    def learn(self, member: int, greedy: bool, lessons: Seq[Lesson]) -> None:
        """Count guesses."""
        hits, seen = self._hits[member][greedy], self._seen[member][greedy]
        for raw, value in lessons:
            place = min(int(raw * BINS), BINS - 1)
            if seen[place] >= MOST:
                hits[place] /= 2
                seen[place] /= 2
            hits[place] += value
            seen[place] += 1.0
