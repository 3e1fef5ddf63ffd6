"""Choose how many drafters of a pool take part (CoSine section 4.3).

Another drafter raises the acceptance rate and the drafting time. Both are learned per number of drafters. For a number
without recent measurements, time is assumed proportional and the rate is estimated optimistically, so the number is
tried. The estimate assumes that an added drafter misses independently, and that a removed drafter is hardly missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cospec.core.types import Commit, DraftBudget
from cospec.policies.goodput.acceptance_rates import DECAY_ALL, Floats

MORE, FEWER = 1.0, 0.2  # m drafters are assumed to miss as often as one drafter in m^MORE or m^FEWER tries
IDLE_DECAY = 0.998  # of the counts of unused numbers, per verified draft
WEIGHT = 30.0  # verified tokens that the estimate counts for


class NumDrafters:
    """The current number of drafters, and the acceptance counts of each number."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = most
        self._accepted = [0.0] * (most + 1)
        self._rejected = [0.0] * (most + 1)

    @property
    def nearby(self) -> list[int]:
        """The current number and its neighbours."""
        return [m for m in (self.count, self.count - 1, self.count + 1) if 1 <= m <= self.most]

    @property
    def settled(self) -> bool:
        """Whether the current number has enough observations to be kept for a while."""
        return self._accepted[self.count] + self._rejected[self.count] > 2 * WEIGHT

    def rate(self, m: int, overall: float) -> float:
        """Return the acceptance rate with ``m`` drafters, given ``overall`` with the current number."""
        tries = (m / self.count) ** (MORE if m > self.count else FEWER)
        guess = 1.0 - (1.0 - overall) ** tries
        verified = self._accepted[m] + self._rejected[m]
        return float((self._accepted[m] + WEIGHT * guess) / (verified + WEIGHT))

    def shifted(self, rates: Floats, m: int, overall: float) -> Floats:
        """Return the sequences' rates with ``m`` drafters, ``[n]``."""
        found: Floats = (rates + self.rate(m, overall) - overall).clip(0.0, 1.0)
        return found

    def observe(self, commits: Sequence[Commit], given: Mapping[str, DraftBudget]) -> None:
        """Count a step's verified tokens for the number of drafters that made the drafts."""
        for commit in commits:
            if commit.drafted:
                m = given[commit.id].drafters if commit.id in given else None
                current = m or self.count
                decays = [DECAY_ALL if each == current else IDLE_DECAY for each in range(self.most + 1)]
                self._accepted = [count * decay for count, decay in zip(self._accepted, decays, strict=True)]
                self._rejected = [count * decay for count, decay in zip(self._rejected, decays, strict=True)]
                self._accepted[current] += len(commit.path)
                self._rejected[current] += commit.rejected
