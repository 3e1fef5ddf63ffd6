"""Performance of each drafter of a pool for one request, and the resulting weights.

Weights are multiplicative (Minions section 3.2, normalised; 2510.20064): the weight is the exponential of a drafter's
gain. The gain has two parts. The first is the number of right guesses; for steps without the drafter its running
acceptance rate counts. The second is the probability of known tokens under the drafter
(``drafters/prompt_scoring.py``),
which distinguishes drafters before they have drafted. All numbers of a request are one block, with which
``csrc/spec/pool_routing.cpp`` computes the same sums for all requests at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, inf

import numpy as np

LEARNING_RATE = 0.3  # eta, per right guess
LOOK_RATE = 1.5  # the same, per unit of probability of a known token
LOOK_MEMORY = 0.5  # weight of earlier scores at the next scoring
MEMORY = 0.98  # weight of a token's evidence one committed token later
PRIOR_TOKENS = 4.0  # tokens that the prior counts for
EDGE = 0.02  # minimum distance of rates from 0 and 1 before conversion to odds


class WeightPrior:
    """The rates that a new request starts with, ``[M]``: a moving average over finished requests, and their odds."""

    def __init__(self, members: int, start: float = 0.5) -> None:
        self.numbers = np.full((2, members), start)
        self.rates, self.odds = self.numbers
        self.address: int = self.numbers.ctypes.data
        self.odds[:] = _odds(self.rates.tolist())

    def learn(self, standing: DrafterWeights) -> None:
        """Move a tenth towards a finished request's rates; less if few tokens were seen."""
        usual = self.rates.tolist()
        steps = [0.1 * min(1.0, seen / 20.0) for seen in standing.seen.tolist()]
        moved = [old + step * (rate - old) for old, rate, step in zip(usual, standing.rates(self), steps, strict=True)]
        self.numbers[:] = moved, _odds(moved)


class DrafterWeights:
    """One request's record; written by the pool alone, ``scores`` by the routing.

    Attributes:
        numbers: the rows below in this order, ``accepted`` last; ``address`` is their memory address.
        hits, seen: ``[M]``, right guesses and verified guesses; both decay.
        chance, looked: ``[M]``, probability of scored known tokens, and their number; both decay.
        idle: ``[M]``, steps since a drafter took part; infinite if it never did.
        scores: ``[M]``, of a routing with scores.
        accepted: tokens accepted in the latest step.
        look_at: the step before which drafters score again.
        rounds: steps in which the pool drafted for the request.
    """

    __slots__ = (
        "address", "chance", "hits", "idle", "look_at", "looked", "numbers", "rounds", "scores", "seen",
    )  # fmt: skip

    def __init__(self, members: int) -> None:
        self.numbers = np.zeros(6 * members + 1)
        self.hits, self.seen, self.chance, self.looked, self.idle, self.scores = self.numbers[:-1].reshape(6, members)
        self.idle[:], self.scores[:] = inf, 0.5
        self.address: int = self.numbers.ctypes.data
        self.look_at = self.rounds = 0

    @property
    def accepted(self) -> float:
        """Tokens accepted in the latest step."""
        return float(self.numbers[-1])

    def rates(self, prior: WeightPrior) -> list[float]:
        """Return the estimated probability that a drafter guesses the next token right, ``[M]``."""
        return [
            (hits + PRIOR_TOKENS * rate) / (seen + PRIOR_TOKENS)
            for hits, seen, rate in zip(self.hits.tolist(), self.seen.tolist(), prior.rates.tolist(), strict=True)
        ]

    def estimate(self, prior: WeightPrior) -> tuple[list[float], list[float]]:
        """Return ``weights``, and each drafter's odds here relative to its usual odds, ``[M]``."""
        rates = self.rates(prior)
        return self._weights(rates), [own / usual for own, usual in zip(_odds(rates), prior.odds.tolist(), strict=True)]

    def weights(self, prior: WeightPrior) -> list[float]:
        """Return positive weights with sum 1, ``[M]``."""
        return self._weights(self.rates(prior))

    def _weights(self, rates: list[float]) -> list[float]:
        best, scale = max(rates), LEARNING_RATE * (max(self.seen.tolist()) + PRIOR_TOKENS)
        gains = [scale * (rate - best) for rate in rates]
        looked = self.looked.tolist()
        most = max(looked)
        if most:
            means = [
                chance / count if count else -1.0 for chance, count in zip(self.chance.tolist(), looked, strict=True)
            ]
            top = max(means)
            gains = [
                gain if mean < 0.0 else gain + LOOK_RATE * most * (mean - top)
                for gain, mean in zip(gains, means, strict=True)
            ]
            top = max(gains)
            gains = [gain - top for gain in gains]
        raised = [exp(gain) for gain in gains]
        sum_ = total(raised)
        return [each / sum_ for each in raised]

    def fade(self, tokens: int) -> None:
        """Decay the evidence by ``tokens`` committed tokens."""
        kept = MEMORY**tokens
        self.hits *= kept
        self.seen *= kept

    def saw(self, member: int, hits: float, seen: float) -> None:
        """Record that a drafter guessed ``hits`` of ``seen`` known tokens right."""
        self.hits[member] += hits
        self.seen[member] += seen

    def went(self, accepted: int) -> None:
        """Record the number of accepted tokens of the latest draft."""
        self.numbers[-1] = accepted

    def look(self, looks: Sequence[tuple[float, int] | None]) -> None:
        """Record scores: probability and number of known tokens per drafter, ``[M]``; None for no score."""
        chances, counts = zip(*[(0.0, 0) if own is None else own for own in looks], strict=True)
        kept = [1.0 if own is None else LOOK_MEMORY for own in looks]
        self.chance[:] = [keep * old + new for keep, old, new in zip(kept, self.chance.tolist(), chances, strict=True)]
        self.looked[:] = [keep * old + new for keep, old, new in zip(kept, self.looked.tolist(), counts, strict=True)]

    def took_part(self, members: Sequence[int]) -> None:
        """Record that ``members`` drafted in a step."""
        self.idle += 1
        self.idle[list(members)] = 0


def total(values: Iterable[float]) -> float:
    """Add from left to right with rounding at each step; ``sum`` differs between Python versions."""
    found = 0.0
    for value in values:
        found += value
    return found


def _odds(rates: Sequence[float]) -> list[float]:
    kept = [EDGE if rate < EDGE else 1.0 - EDGE if rate > 1.0 - EDGE else rate for rate in rates]
    return [rate / (1.0 - rate) for rate in kept]
