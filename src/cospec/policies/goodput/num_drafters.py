"""How many drafters of a pool take part: more while the target waits, fewer when they cost more than they bring.

CoSine section 4.3. Another drafter raises the acceptance rate and the time of drafting. Both are learned for each
number of drafters. Before a number was tried, or when that was long ago, its time is guessed in proportion and its rate
hopefully, so that it is tried: one more helps as if drafters missed independently, one fewer is missed little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cospec.core.types import Commit, DraftBudget
from cospec.policies.goodput.acceptance_rates import FADE_ALL, Floats

MORE, FEWER = 1.0, 0.2  # m drafters are guessed to miss as often as one with m^MORE tries would, or m^FEWER
FORGET = 0.998  # of what is known of the numbers that are not at work, per judged draft
WEIGHT = 30.0  # judgements that the guess counts for


class NumDrafters:
    """The number at work, and what is known of it and the others."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = most
        self._accepted = [0.0] * (most + 1)
        self._rejected = [0.0] * (most + 1)

    @property
    def nearby(self) -> list[int]:
        """The present number, and those next to it."""
        return [m for m in (self.count, self.count - 1, self.count + 1) if 1 <= m <= self.most]

    @property
    def settled(self) -> bool:
        """Whether enough is known of the present number to keep to it for a while."""
        return self._accepted[self.count] + self._rejected[self.count] > 2 * WEIGHT

    def rate(self, m: int, overall: float) -> float:
        """Acceptance rate with ``m`` drafters, where it is ``overall`` with the present number."""
        tries = (m / self.count) ** (MORE if m > self.count else FEWER)
        guess = 1.0 - (1.0 - overall) ** tries
        judged = self._accepted[m] + self._rejected[m]
        return float((self._accepted[m] + WEIGHT * guess) / (judged + WEIGHT))

    def shifted(self, rates: Floats, m: int, overall: float) -> Floats:
        """The rates that sequences would have with ``m`` drafters, or have now if others drafted until just now."""
        found: Floats = (rates + self.rate(m, overall) - overall).clip(0.0, 1.0)
        return found

    def observe(self, commits: Sequence[Commit], given: Mapping[str, DraftBudget]) -> None:
        """Count the judgements of a round to the number of drafters that made its drafts."""
        for commit in commits:
            if commit.drafted:
                m = given[commit.id].drafters if commit.id in given else None
                at_work = m or self.count
                fades = [FADE_ALL if each == at_work else FORGET for each in range(self.most + 1)]
                self._accepted = [count * fade for count, fade in zip(self._accepted, fades, strict=True)]
                self._rejected = [count * fade for count, fade in zip(self._rejected, fades, strict=True)]
                self._accepted[at_work] += len(commit.path)
                self._rejected[at_work] += commit.rejected
