"""How well each drafter of a pool has done for one request, and the weights that follow from it.

Weights are multiplicative (Minions section 3.2, normalised; 2510.20064): a drafter's weight is the exponential of the
tokens it would have got right. Of the committed tokens a drafter has been seen to guess some: those its draft came to,
and those it read when it caught up. For the others its own rate so far is taken, so that nobody loses weight by not
having been asked.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from cospec.draws import Floats

LEARNING_RATE = 0.3  # eta, per token guessed right
MEMORY = 0.98  # what a token's evidence is worth one committed token later
PRIOR_TOKENS = 4.0  # how many seen tokens the prior is worth
EDGE = 0.02  # rates are kept this far from 0 and 1


class Prior:
    """The rates that a new request starts with: a moving average over finished requests, ``[M]``."""

    def __init__(self, members: int, start: float = 0.5) -> None:
        self.rates: Floats = np.full(members, start)

    def learn(self, standing: Standing) -> None:
        """Move a tenth towards a finished request's rates, less where little was seen."""
        step = 0.1 * np.minimum(1.0, standing.seen / 20.0)
        self.rates += step * (standing.rates(self) - self.rates)


@dataclass(slots=True)
class Standing:
    """One request's record; written by the pool alone.

    Attributes:
        hits, seen: ``[M]``, known tokens that a drafter guessed right, and those it was seen to guess; both fade.
        idle: ``[M]``, rounds since a drafter took part.
        rounds: in which the pool drafted for the request.
        accepted: tokens accepted in the latest round.
    """

    hits: Floats
    seen: Floats
    idle: list[int]
    rounds: int = 0
    accepted: int = 0
    scores: list[float] = field(default_factory=list)  # of the routing, where it keeps some

    @classmethod
    def fresh(cls, members: int) -> Standing:
        """Of a request that nobody has drafted for."""
        return cls(np.zeros(members), np.zeros(members), [0] * members)

    def rates(self, prior: Prior) -> Floats:
        """``[M]``, the estimated chance that a drafter guesses the next token right."""
        return np.asarray((self.hits + PRIOR_TOKENS * prior.rates) / (self.seen + PRIOR_TOKENS))

    def weights(self, prior: Prior) -> Floats:
        """``[M]``, positive, summing to 1."""
        gains = LEARNING_RATE * (float(self.seen.max()) + PRIOR_TOKENS) * self.rates(prior)
        raised = np.exp(gains - gains.max())
        return np.asarray(raised / raised.sum())

    def shifts(self, prior: Prior) -> Floats:
        """``[M]``, log-odds by which a drafter does better for this request than it usually does."""
        return _log_odds(self.rates(prior)) - _log_odds(prior.rates)

    def fade(self, tokens: int) -> None:
        """``tokens`` more were committed."""
        self.hits *= MEMORY**tokens
        self.seen *= MEMORY**tokens

    def saw(self, member: int, hits: float, seen: float) -> None:
        """A drafter guessed ``hits`` of ``seen`` known tokens right."""
        self.hits[member] += hits
        self.seen[member] += seen

    def took_part(self, members: Seq[int]) -> None:
        """A round was drafted by ``members``."""
        self.rounds += 1
        for member in range(len(self.idle)):
            self.idle[member] = 0 if member in members else self.idle[member] + 1


def _log_odds(rates: Floats) -> Floats:
    kept = np.clip(rates, EDGE, 1.0 - EDGE)
    return np.asarray(np.log(kept / (1.0 - kept)))
