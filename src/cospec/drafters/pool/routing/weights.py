"""How well each drafter of a pool has done for one request, and the weights that follow from it.

Weights are multiplicative (Minions section 3.2, normalised; 2510.20064): a drafter's weight is the exponential of what
it has gained. It gains by two things. One is the tokens that it guessed right while it took part; where it did not, its
rate so far is taken, so that nobody loses weight by not having been asked. The other is how likely it found known
tokens when it looked at them (``drafters/prompt_scoring.py``), which tells drafters of one request apart before any of
them has drafted. One block of numbers per request, with which ``csrc/spec/pool_routing.cpp`` computes the same sums for
all requests at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, inf

import numpy as np

LEARNING_RATE = 0.3  # eta, per token guessed right
LOOK_RATE = 1.5  # the same, per unit of probability given to a known token
LOOK_MEMORY = 0.5  # what the looks before are worth at the next one
MEMORY = 0.98  # what a token's evidence is worth one committed token later
PRIOR_TOKENS = 4.0  # how many seen tokens the prior is worth
EDGE = 0.02  # rates are kept this far from 0 and 1 where odds are made of them


class WeightPrior:
    """The rates that a new request starts with: a moving average over finished requests, ``[M]``, and their odds."""

    def __init__(self, members: int, start: float = 0.5) -> None:
        self.numbers = np.full((2, members), start)
        self.rates, self.odds = self.numbers
        self.address: int = self.numbers.ctypes.data
        self.odds[:] = _odds(self.rates.tolist())

    def learn(self, standing: DrafterWeights) -> None:
        """Move a tenth towards a finished request's rates, less where little was seen."""
        usual = self.rates.tolist()
        steps = [0.1 * min(1.0, seen / 20.0) for seen in standing.seen.tolist()]
        moved = [old + step * (rate - old) for old, rate, step in zip(usual, standing.rates(self), steps, strict=True)]
        self.numbers[:] = moved, _odds(moved)


class DrafterWeights:
    """One request's record; written by the pool alone, ``scores`` by the routing.

    Attributes:
        numbers: the rows that follow, in this order, ``accepted`` last; ``address`` is where the library finds them.
        hits, seen: ``[M]``, known tokens that a drafter guessed right, and those it was seen to guess; both fade.
        chance, looked: ``[M]``, probability that it gave to known tokens it looked at, and how many; both fade.
        idle: ``[M]``, rounds since a drafter took part; infinitely many where it never did.
        scores: ``[M]``, of a routing that keeps some.
        accepted: tokens accepted in the latest round.
        look_at: the round before which drafters look again.
        rounds: in which the pool drafted for the request.
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
        """See the class."""
        return float(self.numbers[-1])

    def rates(self, prior: WeightPrior) -> list[float]:
        """``[M]``, the estimated chance that a drafter guesses the next token right."""
        return [
            (hits + PRIOR_TOKENS * rate) / (seen + PRIOR_TOKENS)
            for hits, seen, rate in zip(self.hits.tolist(), self.seen.tolist(), prior.rates.tolist(), strict=True)
        ]

    def estimate(self, prior: WeightPrior) -> tuple[list[float], list[float]]:
        """``weights``, and by which factor the odds of each drafter's guesses are better here than usually, ``[M]``."""
        rates = self.rates(prior)
        return self._weights(rates), [own / usual for own, usual in zip(_odds(rates), prior.odds.tolist(), strict=True)]

    def weights(self, prior: WeightPrior) -> list[float]:
        """``[M]``, positive, summing to 1."""
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
        """``tokens`` more were committed."""
        kept = MEMORY**tokens
        self.hits *= kept
        self.seen *= kept

    def saw(self, member: int, hits: float, seen: float) -> None:
        """A drafter guessed ``hits`` of ``seen`` known tokens right."""
        self.hits[member] += hits
        self.seen[member] += seen

    def went(self, accepted: int) -> None:
        """So many tokens of the latest draft were accepted."""
        self.numbers[-1] = accepted

    def look(self, looks: Sequence[tuple[float, int] | None]) -> None:
        """Drafters gave so many known tokens this much of probability in all; None: one did not look, ``[M]``."""
        chances, counts = zip(*[(0.0, 0) if own is None else own for own in looks], strict=True)
        kept = [1.0 if own is None else LOOK_MEMORY for own in looks]
        self.chance[:] = [keep * old + new for keep, old, new in zip(kept, self.chance.tolist(), chances, strict=True)]
        self.looked[:] = [keep * old + new for keep, old, new in zip(kept, self.looked.tolist(), counts, strict=True)]

    def took_part(self, members: Sequence[int]) -> None:
        """A round was drafted by ``members``."""
        self.idle += 1
        self.idle[list(members)] = 0


def total(values: Iterable[float]) -> float:
    """Added from left to right and rounded each time, which ``sum`` does not do on every Python."""
    found = 0.0
    for value in values:
        found += value
    return found


def _odds(rates: Sequence[float]) -> list[float]:
    kept = [EDGE if rate < EDGE else 1.0 - EDGE if rate > 1.0 - EDGE else rate for rate in rates]
    return [rate / (1.0 - rate) for rate in kept]
