"""Chooses the round by what was measured: drafting beside verification has to be possible, to promise, and to keep it.

Begins ``sequential`` and measures how long the target and the drafter take. Where the two share their hardware, one
after the other on all of it is as fast as both beside each other, so it stays there. Where the drafter has hardware of
its own, or a process of its own, and the stage times promise something, the round that promises most is tried, and
kept if it is faster. What was found holds for the load that it was found under: when that has doubled or halved, it is
measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from cospec.core.interfaces import ExecutionMode, StepContext
from cospec.core.rng import Floats
from cospec.core.stats import ExecutionInfo, StepTimes
from cospec.core.types import Commit, SchedulerOutput, StepOutput
from cospec.execution.draft_ahead import DraftAhead
from cospec.execution.pipelined import Pipelined
from cospec.execution.sequential import Sequential

WINDOW = 64  # rounds with drafts that a choice rests on
TURNS = 2  # of each of two rounds that are compared
WORTH = 1.05  # a gain below this is not worth a change
CHANGED = 2.0  # times as many or as few sequences are another load

_ROUNDS: dict[str, Callable[[StepContext], ExecutionMode]] = {
    "sequential": Sequential,
    "pipelined": Pipelined,
    "draft-ahead": DraftAhead,
}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Window:
    """What the rounds of one kind did since they began."""

    rounds: int = 0
    seconds: float = 0.0
    tokens: int = 0
    judged: int = 0  # drafts
    whole: int = 0  # drafts of which all was accepted
    stages: list[tuple[int, float, float]] = field(default_factory=list)  # sequences, seconds of drafting and target

    @property
    def speed(self) -> float:
        """Committed tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def share(self) -> float:
        """Of drafting in the time of drafting and verification."""
        _, draft, target = np.sum(self.stages, axis=0)
        return float(draft / (draft + target))

    def promises(self) -> dict[str, float]:
        """How many times faster each round would be if nothing slowed the overlapping stages down.

        ``pipelined`` takes as long as the slower stage for half of the sequences, which the measured rounds of
        different widths predict; ``draft-ahead`` saves the drafting when every draft was accepted whole.
        """
        widths, drafts, targets = np.array(self.stages, dtype=np.float64).T
        width, draft, target = widths.mean(), drafts.mean(), targets.mean()
        half = max(_at(width / 2, widths, drafts), _at(width / 2, widths, targets))
        kept = self.whole / self.judged if self.judged else 0.0
        return {
            "pipelined": float((draft + target) / (2.0 * half)) if half > 0 else 0.0,
            "draft-ahead": float((draft + target) / (max(draft, target) + (1.0 - kept**width) * draft)),
        }


class _Trial:
    """Another round and ``sequential`` by turns, so that a machine whose speed changes favours neither."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = [name, "sequential"] * TURNS  # whose turns are to come, the one at work first
        self._done = {name: _Window(), "sequential": _Window()}

    def count(self, seen: _Window) -> None:
        """The turn at work has ended."""
        done = self._done[self.left.pop(0)]
        done.seconds, done.tokens = done.seconds + seen.seconds, done.tokens + seen.tokens

    @property
    def gain(self) -> float:
        """How many times as fast as ``sequential`` the other one was."""
        before = self._done["sequential"].speed
        return self._done[self.name].speed / before if before else 0.0


class Auto:
    """One round at work, and the choice of it."""

    learns: ClassVar[bool] = True

    def __init__(self, components: StepContext, window: int = WINDOW) -> None:
        self.components = components
        self.times, self.info = StepTimes(), ExecutionInfo("sequential", "stage times are not measured yet")
        self.readable: Mapping[str, str] = {}
        self._window_size = window
        self._round: ExecutionMode = Sequential(components)
        self._seen = _Window()
        self._trial: _Trial | None = None
        self._settled = False
        self._width = self._load = 0.0  # sequences that are drafted for: of late, and when the round was chosen

    @property
    def at_work(self) -> ExecutionMode:
        """The round that runs now."""
        return self._round

    def run(self, plan: SchedulerOutput) -> list[StepOutput]:
        """As the round at work does."""
        self._follow(plan)
        if not self._settled and self._seen.rounds >= self._window_size // (TURNS if self._trial else 1):
            self._decide()
        started = self.components.clock()
        outcomes = self._round.run(plan)
        self.times, self.readable = self._round.times, self._round.readable
        if not self._settled:
            self._measure(outcomes, self.components.clock() - started)
        return outcomes

    def commit(self, commits: Sequence[Commit]) -> None:
        """As the round at work does."""
        if not self._settled:
            self._seen.tokens += sum(len(commit.tokens) for commit in commits)
            self._seen.judged += sum(commit.drafted > 0 for commit in commits)
            self._seen.whole += sum(commit.drafted > 0 and not commit.rejected for commit in commits)
        self._round.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """As the round at work does."""
        self._round.free(ids)

    def close(self) -> None:
        """As the round at work does."""
        self._round.close()

    def _follow(self, plan: SchedulerOutput) -> None:
        """Keep up with the load, and begin anew when it is another one."""
        if self.components.executor is None or not self.components.executor.parallel:
            return
        width = sum(entry.budget.depth > 0 for entry in plan.entries)
        if width:
            self._width += (width - self._width) / (self._window_size if self._width else 1)
        chosen = self._settled or self._trial is not None
        if chosen and not self._load / CHANGED <= self._width <= self._load * CHANGED:
            self._seen, self._trial, self._settled = _Window(), None, False
            self._put("sequential")
            self._say("the load has changed, so stage times are measured again")

    def _measure(self, outcomes: Sequence[StepOutput], seconds: float) -> None:
        drafted = sum(outcome.draft is not None for outcome in outcomes)
        seen = self._seen
        seen.rounds += drafted > 0
        seen.seconds += seconds
        if drafted:
            seen.stages.append((drafted, self.times.draft, self.times.target))

    def _decide(self) -> None:
        if self._trial is not None:
            self._end_turn(self._trial)
            return
        seen, executor = self._seen, self.components.executor
        part = f"drafting takes {seen.share:.0%} of the stages' time"
        if executor is None or not executor.parallel:
            self._settle(f"{part}, but drafter and target share their hardware, so nothing is gained by overlapping")
            return
        name, gain = max(seen.promises().items(), key=lambda pair: pair[1])
        if gain < WORTH:
            self._settle(f"{part}, and overlapping promises {gain:.2f} times the speed at most")
            return
        self._trial, self._seen, self._load = _Trial(name), _Window(), self._width
        self._put(name)
        self._say(f"{part}; promises {gain:.2f} times the speed, and is tried by turns with sequential")

    def _end_turn(self, trial: _Trial) -> None:
        """Count what the round at work did; the other one is next, or the faster one stays."""
        trial.count(self._seen)
        self._seen = _Window()
        if trial.left:
            self._put(trial.left[0])
            return
        self._trial, gain = None, trial.gain
        self._put(trial.name if gain > 1.0 else "sequential")
        compared = f"measured {gain:.2f} times the speed of sequential"
        self._settle(compared if gain > 1.0 else f"{trial.name} was tried and had {gain:.2f} times its speed")

    def _put(self, name: str) -> None:
        """Let another round work."""
        if name == self.info.name:
            return
        self._round.close()
        self._round, self.info = _ROUNDS[name](self.components), ExecutionInfo(name, self.info.reason)

    def _settle(self, reason: str) -> None:
        self._settled, self._load = True, self._width
        self._say(reason)

    def _say(self, reason: str) -> None:
        self.info = ExecutionInfo(self.info.name, reason)
        _log.info("round %s: %s", self.info.name, reason)


def _at(width: float, widths: Floats, seconds: Floats) -> float:
    """A stage's time for so many sequences: a line through the measured rounds; their mean where all were alike."""
    spread = widths - widths.mean()
    if not spread.any():
        return float(seconds.mean())
    slope = max(0.0, float(spread @ (seconds - seconds.mean()) / (spread @ spread)))
    return max(float(seconds.mean()) + slope * (width - float(widths.mean())), 0.0)
