"""What earlier requests say about the drafters of a new request: naive Bayes over the tokens of prompts.

CoSine routes requests to the drafters that know their subject (section 4.2), and learns the subject of each request
anew. Here the subject of earlier requests counts before a drafter has read anything: prompts with the same tokens
mostly have the same best drafter. Scores of known tokens teach this model. A prompt of a new subject has fewer tokens
that the model knows than usual, and is scored. Some other prompts are scored too, so that the model follows a change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import sqrt

import numpy as np

READ = 128  # tokens at the end of a prompt
SMOOTHING = 2.0  # requests of average prompts that each drafter's own requests are mixed with
TRUST = 0.5  # share of the evidence that counts, because the tokens of a prompt depend on each other
MOST_GAIN = 4.0  # between the best and the worst drafter, in the units of ``DrafterWeights``
FIRST = 12  # requests that are learned, and then requests that are compared, before the model says anything
AUDIT = 16  # of so many requests with a subject that the model knows, one is scored nevertheless
MEMORY = 4096  # requests after which a request counts 1 / e
LARGEST = 1e100  # weight of a request, by which all weights are divided then
RATE = 0.1  # of the moving averages of the share of known tokens
SPREAD = 1.5  # standard deviations below the mean from where on a share is unusually low


class PromptPrior:
    """Weighted counts of requests by the tokens of their prompts, and by the drafter that was best.

    Later requests have larger weights, as if earlier ones were forgotten.
    """

    def __init__(self, members: int) -> None:
        self._weight = 1.0  # of the latest request
        self._totals = np.zeros(members)
        self._counts: dict[int, np.ndarray] = {}  # [M] by token
        self._known = self._square = 0.0  # moving averages of the share of known tokens, and of its square
        self._learned = self._compared = 0

    @staticmethod
    def subject(prompt: Sequence[int]) -> frozenset[int]:
        """Return the tokens of a prompt that the model reads."""
        return frozenset(prompt[-READ:])

    def gains(self, subject: Collection[int]) -> list[float]:
        """Return the gain of each drafter over the best for a new request, ``[M]``.

        Empty for a subject that the model does not know, and for a request that is scored nevertheless.
        """
        known = [counts for token in subject if (counts := self._counts.get(token)) is not None]
        if self._learned < FIRST or not self._knows(len(known), subject) or self._compared % AUDIT == 0:
            return []
        counts, totals = np.array(known) / self._weight, self._totals / self._weight
        average = SMOOTHING * counts.sum(axis=1, keepdims=True) / totals.sum()
        evidence = TRUST * np.log((counts + average) / (totals + SMOOTHING)).sum(axis=0) + np.log(totals + SMOOTHING)
        found: list[float] = np.maximum(evidence - evidence.max(), -MOST_GAIN).tolist()
        return found

    def learn(self, subject: Collection[int], weights: Sequence[float]) -> None:
        """Count a request, divided over the drafters by what the request's own evidence says of them.

        Args:
            weights: ``[M]``, with sum 1.
        """
        self._learned += 1
        self._weight *= 1.0 + 1.0 / MEMORY
        if self._weight > LARGEST:
            for counts in (self._totals, *self._counts.values()):
                counts /= self._weight
            self._weight = 1.0
        own = self._weight * np.array(weights)
        self._totals += own
        for token in subject:
            counts = self._counts.setdefault(token, np.zeros(len(own)))
            counts += own

    def _knows(self, known: int, subject: Collection[int]) -> bool:
        """Return whether as many of a prompt's tokens were in earlier prompts as usual, and any."""
        share = known / max(1, len(subject))
        least = self._known - SPREAD * sqrt(max(0.0, self._square - self._known**2))
        self._compared += 1
        early, rate = self._compared <= FIRST, max(RATE, 1.0 / self._compared)
        counted = share if early else max(share, least)  # several requests of a new subject do not become usual at once
        self._known += rate * (counted - self._known)
        self._square += rate * (counted * counted - self._square)
        return known > 0 and share >= least and not early
