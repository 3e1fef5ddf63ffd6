"""Which of several ways of doing the same work is the quickest: predicted at first, then tried and timed by turns.

A way that was tried little is judged in its favour (optimism under uncertainty, as UCB does), so that what is predicted
to be good is tried soon and what was not tried for long is tried again. What trials lost against the best known way is
counted: there are new ones only as long as that stays within an allowance, so being wrong has a bounded price. A way
that is expected to be clearly quicker than the best one is no such trial; its first rounds say whether it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

TRIAL = 8  # rounds of a trial, and between two looks at what to do next
OPTIMISM = 0.3  # share by which a way is judged too quick before its first round; falls with the root of its rounds
DOUBT = 5.0  # rounds that a prediction counts for beside measured ones
IDLE, MOST = 0.999, 200.0  # what a round's evidence keeps per later round, and the rounds of evidence that are kept
WORTH = 0.95  # of the basic way's time per token that another has to stay below: batches thin out less evenly with it
CAUTION = 0.3  # share by which a way is judged too slow when it is to take another's place; falls likewise
CLEAR = 0.98  # of the best known way's time; what is expected below it is no trial to lose by
TINY = 1e-12  # seconds; predictions may be 0 on a virtual clock
OUTLIER = 3.0  # times the expected duration that a disturbed round counts as
LOSSES, START = 0.01, 6.0  # what trials may lose: a share of all time, and rounds of the basic way to begin with


@dataclass(slots=True)
class _Tally:
    seconds: float = 0.0
    tokens: float = 0.0
    rounds: float = 0.0

    def fade(self, share: float) -> None:
        self.seconds, self.tokens, self.rounds = self.seconds * share, self.tokens * share, self.rounds * share


class Bandit:
    """Ways are numbered; way 0 is the basic one, which is always measured.

    Args:
        count: of ways.
        first: the one to begin with.
    """

    def __init__(self, count: int, first: int) -> None:
        self._tallies = [_Tally() for _ in range(count)]
        self._expected = [1.0] * count
        self._now, self._left, self._best = first, TRIAL, first  # a trial of ``now`` has so many rounds left
        self._spent = self._lost = 0.0
        self._times = self._estimates()  # as they were at the last choice

    @property
    def now(self) -> int:
        """The way that the next round goes."""
        return self._now

    @property
    def best(self) -> int:
        """The quickest of those that were measured."""
        return self._best

    def expect(self, seconds: Sequence[float]) -> None:
        """Predicted seconds per token of every way; their common error is learned."""
        self._expected = [max(time, TINY) for time in seconds]
        self._times = self._estimates()

    def ran(self, seconds: float, tokens: int, settled: bool) -> None:
        """A round took so long for so many tokens; unless ``settled``, it went on with what another way had begun."""
        times = self._times
        seconds = min(seconds, OUTLIER * max(times[self._now] * tokens, times[0]) if self._tallies[0].rounds else inf)
        self._spent += seconds
        if self._now != self._best:
            self._lost = max(0.0, self._lost + seconds - tokens * times[self._best])
        if settled:
            tally = self._tallies[self._now]
            if tally.rounds >= MOST:
                tally.fade(1 - 1 / MOST)
            tally.seconds, tally.tokens, tally.rounds = tally.seconds + seconds, tally.tokens + tokens, tally.rounds + 1
        self._left -= 1
        if self._left <= 0:
            self._choose()

    def _choose(self) -> None:
        for tally in self._tallies:
            tally.fade(IDLE**TRIAL)
        times, basic = self._estimates(), self._tallies[0]
        self._times = times
        margins = [1 / sqrt(1 + tally.rounds) for tally in self._tallies]
        sure = [time * (1 + CAUTION * margin) for time, margin in zip(times, margins, strict=True)]
        hopes = [time * (1 - OPTIMISM * margin) for time, margin in zip(times, margins, strict=True)]
        measured = [way for way, tally in enumerate(self._tallies) if tally.rounds >= 1]
        quickest = min(measured or [self._now], key=lambda way: sure[way])
        if self._best not in measured or sure[quickest] < times[self._best]:
            self._best = quickest
        if 0 in measured and times[self._best] > WORTH * times[0]:
            self._best = 0
        self._now, self._left = self._best, TRIAL
        likely, tried = (min(range(len(times)), key=kind.__getitem__) for kind in (times, hopes))
        allowed = LOSSES * self._spent + START * basic.seconds / max(basic.rounds, 1.0)
        if not basic.rounds:
            self._now = 0
        elif times[likely] < (CLEAR if self._best else WORTH) * times[self._best]:
            self._now = likely
        elif tried != self._best and hopes[tried] < times[self._best] and self._lost < allowed:
            self._now = tried

    def _estimates(self) -> list[float]:
        """Seconds per token of every way, predicted and measured ones joined."""
        basic, others = self._tallies[0], self._tallies[1:]
        foreseen = sum(tally.tokens * time for tally, time in zip(others, self._expected[1:], strict=True))
        errors = [1.0 if not basic.tokens else basic.seconds / (basic.tokens * self._expected[0])]
        errors += [1.0 if not foreseen else sum(tally.seconds for tally in others) / foreseen] * len(others)
        found = []
        for tally, time, error in zip(self._tallies, self._expected, errors, strict=True):
            told = tally.seconds / tally.tokens if tally.tokens else 0.0
            found.append((DOUBT * time * error + tally.rounds * told) / (DOUBT + tally.rounds))
        return found
