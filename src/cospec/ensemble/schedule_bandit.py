"""Find the fastest of several ways to do the same work (arms): predicted first, then tried and measured in turn.

An arm with few measurements is judged optimistically (optimism under uncertainty, as in UCB). So promising arms are
tried soon, and arms without recent measurements are tried again. The regret, the time lost against the best known arm,
is counted: new trials start only within an allowance, which bounds the cost of wrong predictions. An arm that is
expected to be clearly faster than the best needs no allowance; its first steps confirm or refute the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

TRIAL = 8  # steps of a trial, and between two choices
OPTIMISM = 0.3  # relative optimism about an arm before its first step; falls with the root of its steps
PRIOR_STEPS = 5.0  # steps that a prediction counts for
SHARED_STEPS = 4.0  # steps that the error of all predictions counts for in the error of one kind
DECAY, MAX_STEPS = 0.999, 200.0  # weight that a step keeps per later step, and the steps that are kept
MIN_GAIN = 0.95  # another arm must stay below this share of the baseline's time: batches thin out less evenly with it
PESSIMISM = 0.3  # relative pessimism about an arm before it replaces the best; falls likewise
CLEAR_GAIN = 0.98  # share of the best known time; an arm expected below it needs no allowance
TINY = 1e-12  # seconds; predictions may be 0 on a virtual clock
OUTLIER = 3.0  # times the expected duration, the limit of a disturbed step
REGRET_SHARE, REGRET_START = 0.01, 6.0  # allowance of trials: a share of all time, and steps of the baseline initially


@dataclass(slots=True)
class _ArmStats:
    seconds: float = 0.0
    tokens: float = 0.0
    steps: float = 0.0

    def decay(self, share: float) -> None:
        self.seconds, self.tokens, self.steps = self.seconds * share, self.tokens * share, self.steps * share


class Bandit:
    """Arms are numbered; arm 0 is the baseline, which is always measured.

    Args:
        kinds: of each arm; predictions of one kind are wrong by about one factor.
        first: the first arm to run.

    Attributes:
        regret: seconds lost against the best known arm so far.
    """

    def __init__(self, kinds: Sequence[object], first: int) -> None:
        self._arms = [_ArmStats() for _ in kinds]
        self._expected = [1.0] * len(kinds)
        self._alike = {kind: [arm for arm, own in enumerate(kinds) if arm and own == kind] for kind in kinds[1:]}
        self._current, self._left, self._best = first, TRIAL, first  # steps left in the trial of the current arm
        self._spent = self.regret = 0.0
        self._times = self._estimates()  # as of the last choice

    @property
    def current(self) -> int:
        """The arm of the next step."""
        return self._current

    @property
    def best(self) -> int:
        """The fastest measured arm."""
        return self._best

    def predict(self, seconds: Sequence[float]) -> None:
        """Set the predicted seconds per token of every arm; the error of each kind is learned."""
        self._expected = [max(time, TINY) for time in seconds]
        self._times = self._estimates()

    def observe(self, seconds: float, tokens: int, warm: bool) -> None:
        """Record a step's seconds and tokens; unless ``warm``, the step continued work that another arm began."""
        times = self._times
        seconds = min(seconds, OUTLIER * max(times[self._current] * tokens, times[0]) if self._arms[0].steps else inf)
        self._spent += seconds
        if self._current != self._best:
            self.regret = max(0.0, self.regret + seconds - tokens * times[self._best])
        if warm:
            arm = self._arms[self._current]
            if arm.steps >= MAX_STEPS:
                arm.decay(1 - 1 / MAX_STEPS)
            arm.seconds, arm.tokens, arm.steps = arm.seconds + seconds, arm.tokens + tokens, arm.steps + 1
        self._left -= 1
        if self._left <= 0:
            self._choose()

    def _choose(self) -> None:
        for arm in self._arms:
            arm.decay(DECAY**TRIAL)
        times, baseline = self._estimates(), self._arms[0]
        self._times = times
        margins = [1 / sqrt(1 + arm.steps) for arm in self._arms]
        pessimistic = [time * (1 + PESSIMISM * margin) for time, margin in zip(times, margins, strict=True)]
        optimistic = [time * (1 - OPTIMISM * margin) for time, margin in zip(times, margins, strict=True)]
        measured = [index for index, arm in enumerate(self._arms) if arm.steps >= 1]
        fastest = min(measured or [self._current], key=lambda index: pessimistic[index])
        if self._best not in measured or pessimistic[fastest] < times[self._best]:
            self._best = fastest
        if 0 in measured and times[self._best] > MIN_GAIN * times[0]:
            self._best = 0
        self._current, self._left = self._best, TRIAL
        likely, tried = (min(range(len(times)), key=kind.__getitem__) for kind in (times, optimistic))
        allowed = REGRET_SHARE * self._spent + REGRET_START * baseline.seconds / max(baseline.steps, 1.0)
        if not baseline.steps:
            self._current = 0
        elif times[likely] < (CLEAR_GAIN if self._best else MIN_GAIN) * times[self._best]:
            self._current = likely
        elif tried != self._best and optimistic[tried] < times[self._best] and self.regret < allowed:
            self._current = tried

    def _estimates(self) -> list[float]:
        """Return the seconds per token of every arm, from predictions and measurements."""
        errors = [self._error([0])] * len(self._arms)
        common = self._error(range(1, len(self._arms)))
        for arms in self._alike.values():
            error = self._error(arms, common)
            for place in arms:
                errors[place] = error
        found = []
        for arm, time, error in zip(self._arms, self._expected, errors, strict=True):
            measured = arm.seconds / arm.tokens if arm.tokens else 0.0
            found.append((PRIOR_STEPS * time * error + arm.steps * measured) / (PRIOR_STEPS + arm.steps))
        return found

    def _error(self, arms: Sequence[int], common: float | None = None) -> float:
        """Return measured over predicted seconds of ``arms``; few steps lean on the ``common`` error."""
        steps = sum([self._arms[arm].steps for arm in arms])
        predicted = sum([self._arms[arm].tokens * self._expected[arm] for arm in arms])
        if not predicted:
            return 1.0 if common is None else common
        error = sum([self._arms[arm].seconds for arm in arms]) / predicted
        return error if common is None else (SHARED_STEPS * common + steps * error) / (SHARED_STEPS + steps)
