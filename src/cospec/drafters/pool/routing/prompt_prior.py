"""What earlier requests say about the drafters of a new request: naive Bayes over the tokens of prompts.

CoSine routes requests to the drafters that know their subject (section 4.2), and learns this for each request from its
own drafts. Here earlier requests count before a drafter has read anything: prompts with the same tokens mostly have the
same best drafter. Scores of known tokens teach this model, and show how often the model is right. The model gives gains
only if its choices mostly agree with the scores. A prompt of a new subject has fewer known tokens than usual, and is
scored. Some other prompts are scored too, so that the model follows a change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import sqrt
from random import Random

import numpy as np

READ = 128  # tokens at the end of a prompt
SMOOTHING = 2.0  # requests, added to observed and to expected numbers of requests
TRUST = 0.5  # share of the evidence that counts, because the tokens of a prompt depend on each other
MOST_GAIN = 4.0  # between the best and the worst drafter, in the units of ``DrafterWeights``
FIRST = 12  # requests that are learned, and then requests that are judged, before the model says anything
RIGHT = 0.75  # least mean weight, by a request's own evidence, of the model's best drafter over the best weight
AUDITS = 1 / 16  # share of the requests with a known subject that are scored nevertheless
MEMORY = 4096  # requests after which a request counts 1 / e
LARGEST = 1e6  # weight of a request, by which all weights are divided then
FORGOTTEN = 1e-3  # requests; a token of fewer is dropped then
RATE, RIGHT_RATE = 0.1, 0.05  # of the moving averages of the share of known tokens, and of what was right
SPREAD = 1.5  # standard deviations below the mean from where on a share is unusually low


class PromptPrior:
    """Weighted counts of requests by the tokens of their prompts, and by the drafter that was best.

    Later requests have larger weights, as if earlier ones were forgotten.
    """

    def __init__(self, members: int) -> None:
        self._weight = 1.0  # of the latest request
        self._totals = np.zeros(members)
        self._counts: dict[int, np.ndarray] = {}  # [M] by token
        self._scored = np.zeros(members, dtype=bool)  # drafters that can score
        self._known = self._square = 0.0  # moving averages of the share of known tokens, and of its square
        self._right = 0.0  # the same of the weight of the model's best drafter over the best weight
        self._learned = self._judged = self._compared = self._missed = 0
        self._random = Random(0)

    @staticmethod
    def subject(prompt: Sequence[int]) -> frozenset[int]:
        """Return the tokens of a prompt that the model reads."""
        return frozenset(prompt[-READ:])

    def gains(self, subject: Collection[int]) -> list[float]:
        """Return the gain of each drafter over the best for a new request, ``[M]``; 0 for drafters that cannot score.

        Empty for a subject that the model does not know, and for a request that is scored nevertheless.
        """
        if self._learned < FIRST or not self._knows(subject):
            return []
        if self._judged < FIRST or self._right < RIGHT or self._random.random() < AUDITS:
            return []
        evidence = self._evidence(subject)
        gains = np.maximum(evidence - evidence.max(), -MOST_GAIN)
        found: list[float] = np.where(self._scored, gains, 0.0).tolist()
        return found

    def learn(self, subject: Collection[int], weights: Sequence[float], scored: Sequence[bool]) -> None:
        """Count a request, divided over the drafters that have scored it.

        Requests without the scores of some drafters do not count, unless these drafters score no more.

        Args:
            weights: ``[M]``, by the request's own evidence.
            scored: ``[M]``, at least one.
        """
        if (self._scored & ~np.array(scored)).any() and self._missed < FIRST:
            self._missed += 1
            return
        self._scored, self._missed = np.array(scored), 0
        own = np.where(self._scored, weights, 0.0)
        own /= own.sum()
        if self._learned >= FIRST:
            self._judged += 1
            right = float(own[self._evidence(subject).argmax()] / own.max())
            self._right += max(RIGHT_RATE, 1.0 / self._judged) * (right - self._right)
        self._learned += 1
        self._weight *= 1.0 + 1.0 / MEMORY
        if self._weight > LARGEST:
            self._shrink()
        own *= self._weight
        self._totals += own
        for token in subject:
            counts = self._counts.setdefault(token, np.zeros(len(own)))
            counts += own

    def _evidence(self, subject: Collection[int]) -> np.ndarray:
        """Return the logarithm of each drafter's chance to be the best, ``[M]``, up to a constant.

        A token's evidence is how many requests with the token a drafter was best in, over the number to be expected
        if tokens said nothing. A token or a drafter of few requests says little.
        """
        known = [counts for token in subject if (counts := self._counts.get(token)) is not None]
        totals = self._totals / self._weight
        usual = np.log(totals + SMOOTHING)
        if known:
            counts = np.array(known) / self._weight
            expected = counts.sum(axis=1, keepdims=True) * totals / totals.sum()
            usual = usual + TRUST * np.log((counts + SMOOTHING) / (expected + SMOOTHING)).sum(axis=0)
        found: np.ndarray = np.where(self._scored, usual, -np.inf)
        return found

    def _shrink(self) -> None:
        """Divide all weights by that of the latest request, and drop tokens that no late request had."""
        self._totals /= self._weight
        least = FORGOTTEN * self._weight
        self._counts = {token: own / self._weight for token, own in self._counts.items() if own.sum() >= least}
        self._weight = 1.0

    def _knows(self, subject: Collection[int]) -> bool:
        """Return whether as many of a prompt's tokens were in earlier prompts as usual, and any."""
        known = sum([token in self._counts for token in subject])
        share = known / max(1, len(subject))
        least = self._known - SPREAD * sqrt(max(0.0, self._square - self._known**2))
        self._compared += 1
        early, rate = self._compared <= FIRST, max(RATE, 1.0 / self._compared)
        counted = share if early else max(share, least)  # several requests of a new subject do not become usual at once
        self._known += rate * (counted - self._known)
        self._square += rate * (counted * counted - self._square)
        return known > 0 and share >= least and not early
