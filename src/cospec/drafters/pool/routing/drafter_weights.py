"""Performance of each drafter of a pool for one request, and the resulting weights.

Weights are multiplicative (Minions section 3.2, normalised; 2510.20064): the weight is the exponential of a drafter's
gain. The gain has three parts. The first is the number of right candidates; for steps without the drafter its running
acceptance rate counts. The second is the probability of known tokens under the drafter
(``drafters/known_token_scores.py``), which distinguishes drafters before they have drafted. The third is what earlier
requests with like prompts say (``routing/prompt_prior.py``).

The paper multiplies a weight by a factor where the acceptance rate passes a reward or a punish threshold. Such weights
have no bound, and rates between the thresholds change nothing. Here the rate itself counts, and weights have sum 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, inf

LEARNING_RATE = 0.3  # eta, per right candidate
SCORE_RATE = 1.5  # the same, per unit of probability of a known token
SCORE_MEMORY = 0.5  # weight of earlier scores at the next scoring
MEMORY = 0.98  # weight of a token's evidence one committed token later
PRIOR_TOKENS = 4.0  # tokens that the prior counts for
EDGE = 0.02  # minimum distance of rates from 0 and 1 before conversion to odds


class WeightPrior:
    """The rates that a new request starts with, ``[M]``: a moving average over finished requests, and their odds."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates, self.odds = list(rates), _odds(rates)

    def learn(self, weights: DrafterWeights) -> None:
        """Move a tenth towards a finished request's rates; less if few tokens were seen."""
        steps = [0.1 * min(1.0, seen / 20.0) for seen in weights.seen]
        moved = zip(self.rates, weights.rates(self), steps, strict=True)
        self.rates = [old + step * (rate - old) for old, rate, step in moved]
        self.odds = _odds(self.rates)


class DrafterWeights:
    """One request's record; written by the pool alone, ``scores`` by the routing.

    Attributes:
        hits, seen: ``[M]``, right candidates and verified candidates; both decay.
        chance, looked: ``[M]``, probability of scored known tokens, and their number; both decay.
        idle: ``[M]``, steps since a drafter took part; infinite if it never did.
        scores: ``[M]``, of a routing with scores.
        accepted: tokens accepted in the latest step.
        score_at: the step before which drafters score again.
        steps: steps in which the pool drafted for the request.

    Args:
        expected: ``[M]``, gains that are known before the first draft, see ``PromptPrior.gains``; empty for none.
    """

    __slots__ = (
        "_expected",
        "_fixed_gains",
        "_score_gains",
        "accepted",
        "chance",
        "hits",
        "idle",
        "looked",
        "score_at",
        "scores",
        "seen",
        "steps",
    )

    def __init__(self, members: int, expected: Sequence[float] = ()) -> None:
        self.hits, self.seen, self.chance, self.looked = ([0.0] * members for _ in range(4))
        self.idle, self.scores = [inf] * members, [0.5] * members
        self.accepted = self.score_at = self.steps = 0
        self._score_gains: Sequence[float] = ()  # of ``chance``, which changes with a scoring alone
        self._expected = self._fixed_gains = expected  # the latter with the former

    def rates(self, prior: WeightPrior) -> list[float]:
        """Return the estimated probability that a drafter guesses the next token right, ``[M]``."""
        return [
            (hits + PRIOR_TOKENS * rate) / (seen + PRIOR_TOKENS)
            for hits, seen, rate in zip(self.hits, self.seen, prior.rates, strict=True)
        ]

    def estimate(self, prior: WeightPrior) -> tuple[list[float], list[float]]:
        """Return ``weights``, and each drafter's odds here relative to its usual odds, ``[M]``."""
        rates = self.rates(prior)
        return self._weights(rates), [own / usual for own, usual in zip(_odds(rates), prior.odds, strict=True)]

    def weights(self, prior: WeightPrior) -> list[float]:
        """Return positive weights with sum 1, ``[M]``."""
        return self._weights(self.rates(prior))

    @property
    def is_foreseen(self) -> bool:
        """Whether earlier requests say something about the drafters of this request."""
        return bool(self._expected)

    def evidence(self, prior: WeightPrior) -> list[float]:
        """Return the weights without what earlier prompts say, ``[M]``."""
        return self._weights(self.rates(prior), self._score_gains)

    def _weights(self, rates: list[float], fixed: Sequence[float] | None = None) -> list[float]:
        best, scale = max(rates), LEARNING_RATE * (max(self.seen) + PRIOR_TOKENS)
        gains, fixed = [scale * (rate - best) for rate in rates], self._fixed_gains if fixed is None else fixed
        if fixed:
            gains = [gain + more for gain, more in zip(gains, fixed, strict=True)]
            top = max(gains)
            gains = [gain - top for gain in gains]
        raised = [*map(exp, gains)]
        sum_ = total(raised)
        return [each / sum_ for each in raised]

    def decay(self, tokens: int) -> None:
        """Decay the evidence by ``tokens`` committed tokens."""
        kept = MEMORY**tokens
        self.hits = [hits * kept for hits in self.hits]
        self.seen = [seen * kept for seen in self.seen]

    def count(self, member: int, hits: float, seen: float) -> None:
        """Record that a drafter predicted ``hits`` of ``seen`` known tokens right."""
        self.hits[member] += hits
        self.seen[member] += seen

    def score_known_tokens(self, known: Sequence[tuple[float, int] | None]) -> None:
        """Record scores: probability and number of known tokens per drafter, ``[M]``; None for no score."""
        chances, counts = zip(*[(0.0, 0) if own is None else own for own in known], strict=True)
        kept = [1.0 if own is None else SCORE_MEMORY for own in known]
        self.chance = [keep * old + new for keep, old, new in zip(kept, self.chance, chances, strict=True)]
        self.looked = [keep * old + new for keep, old, new in zip(kept, self.looked, counts, strict=True)]
        most = max(self.looked)
        if most:
            means = [chance / count if count else None for chance, count in zip(self.chance, self.looked, strict=True)]
            top = max([mean for mean in means if mean is not None])
            self._score_gains = [0.0 if mean is None else SCORE_RATE * most * (mean - top) for mean in means]
            expected = self._expected or [0.0] * len(means)
            self._fixed_gains = [score + more for score, more in zip(self._score_gains, expected, strict=True)]

    def took_part(self, members: Sequence[int]) -> None:
        """Record that ``members`` drafted in a step."""
        self.idle = [0.0 if member in members else steps + 1 for member, steps in enumerate(self.idle)]


def total(values: Iterable[float]) -> float:
    """Add from left to right with rounding at each step; ``sum`` differs between Python versions."""
    found = 0.0
    for value in values:
        found += value
    return found


def _odds(rates: Sequence[float]) -> list[float]:
    kept = [EDGE if rate < EDGE else 1.0 - EDGE if rate > 1.0 - EDGE else rate for rate in rates]
    return [rate / (1.0 - rate) for rate in kept]
