"""How long the verifier waits for a node: a quantile of the node's time, learned from the node's answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from cospec.core.types import DraftBudget

WARM_UP = 8  # answers before the first deadline
RATE_STEP = 0.1  # of the moving average of seconds per unit of work
MOST_SPREAD = log(10.0)  # a deadline is at most ten times the predicted time, whatever a node does
QUANTILE_STEP = 0.1  # of the quantile of the logarithm of observed / predicted
FED_PER_STEP = 32  # tokens that a drafter feeds at once in the time of one draft token
SLACK = 0.001  # seconds added to every deadline: the clock of the system wakes sleepers late


class ResponseTimes:
    """The times of one node's answers.

    Attributes:
        answers: number of observed answers.
        mean: moving average of the time of an answer, in seconds.
        most: the longest deadline, in seconds; the deadline before ``WARM_UP`` answers.

    Args:
        quantile: share of the answers that come before the deadline, 0 to 1.
    """

    def __init__(self, quantile: float = 0.95, most: float = 10.0) -> None:
        self.answers, self.mean = 0, 0.0
        self._quantile, self.most = quantile, most
        self._rate = 0.0  # seconds per unit of work
        self._spread = 0.0  # logarithm of the quantile of observed / predicted

    def predict(self, work: float) -> float:
        """The mean time of an answer, in seconds; 0 before the first answer."""
        return self._rate * work

    def deadline(self, work: float) -> float:
        """Seconds after which the verifier goes on without the answer."""
        if self.answers < WARM_UP:
            return self.most
        return min(self.most, self._rate * work * exp(self._spread) + SLACK)

    def observe(self, work: float, seconds: float) -> None:
        """Learn from an answer, also from a late answer; ``seconds`` from call to answer."""
        seconds = max(seconds, 1e-6)
        if self.answers:
            below = log(seconds) <= log(self._rate * work) + self._spread
            self._widen(self._quantile - below)
            self._rate += RATE_STEP * (seconds / work - self._rate)
        else:
            self._rate = seconds / work
        self.mean += (seconds - self.mean) * max(RATE_STEP, 1 / (self.answers + 1))
        self.answers += 1

    def miss(self) -> None:
        """Learn that an answer did not come before a generous time."""
        self._widen(self._quantile)

    def _widen(self, share: float) -> None:
        self._spread = min(max(self._spread + QUANTILE_STEP * share, -MOST_SPREAD), MOST_SPREAD)


def work_of(budgets: Sequence[DraftBudget], fed: int) -> float:
    """Units of work of a proposal: the draft steps, the known tokens to be fed, and the message.

    Args:
        fed: tokens that the node has not seen, of all requests.
    """
    return 1.0 + max([budget.depth for budget in budgets], default=0) + fed / FED_PER_STEP
