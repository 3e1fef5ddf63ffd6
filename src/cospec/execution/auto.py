"""Choose the execution mode by measured times: overlap must be possible, promising, and faster when tried.

Begins with ``sequential`` and measures the time of target and drafter. If both share hardware, overlapping gains
nothing, so ``sequential`` is kept. If the drafter has its own hardware or process, the most promising mode is tried
and kept if it is faster. The choice holds for the load under which it was measured. When the load has doubled or
halved, times are measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from cospec.core.interfaces import ExecutionMode, ModeComponents, WindowsAhead
from cospec.core.stats import ExecutionInfo
from cospec.core.submitted_step import StepResult, SubmittedStep
from cospec.core.types import Commit, RequestState, SchedulerOutput
from cospec.execution.draft_ahead import DraftAhead
from cospec.execution.draft_for_outcomes import DraftForOutcomes
from cospec.execution.pipelined import Pipelined
from cospec.execution.sequential import Sequential
from cospec.rng.random_streams import Floats, StreamKind

WINDOW = 64  # steps with drafts that a choice is based on
TURNS = 2  # windows of each of two compared modes
MIN_GAIN = 1.05  # smaller predicted gains are not tried
GUESSED = 0.8  # usual share of outcomes with a branch, for the prediction alone
LOAD_CHANGE = 2.0  # a load factor that triggers new measurements

_MODES: dict[str, Callable[[ModeComponents], ExecutionMode]] = {
    "sequential": Sequential,
    "pipelined": Pipelined,
    "draft-ahead": DraftAhead,
    "draft-for-outcomes": DraftForOutcomes,
}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Window:
    """Measurements of one execution mode since its start."""

    steps: int = 0  # with drafts; of a trial all
    seconds: float = 0.0
    tokens: int = 0
    verified: int = 0  # drafts that were verified
    gained: int = 0  # tokens that these drafts' sequences committed
    fully_accepted: int = 0  # drafts that were accepted completely
    # sequences, seconds of drafting, seconds of the target
    stages: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Committed tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def share(self) -> float:
        """Share of drafting in the time of drafting and verification."""
        _, draft, target = np.sum(self.stages, axis=0)
        return float(draft / (draft + target))

    def predicted_gains(self) -> dict[str, float]:
        """Return the speed-up of each mode if overlapping slows no stage down.

        ``pipelined`` takes as long as the slower stage for half of the sequences; measured steps of different widths
        predict this time. ``draft-ahead`` saves the drafting when every draft was accepted completely.
        ``draft-for-outcomes`` drafts one level more, and commits one token where no branch has the outcome.
        """
        widths, drafts, targets = np.array(self.stages, dtype=np.float64).T
        width, draft, target = widths.mean(), drafts.mean(), targets.mean()
        half = max(_interpolate(width / 2, widths, drafts), _interpolate(width / 2, widths, targets))
        kept = self.fully_accepted / self.verified if self.verified else 0.0
        tokens = self.gained / self.verified if self.verified else 1.0
        share = (GUESSED * tokens + 1.0 - GUESSED) / tokens
        return {
            "pipelined": float((draft + target) / (2.0 * half)) if half > 0 else 0.0,
            "draft-ahead": float((draft + target) / (max(draft, target) + (1.0 - kept**width) * draft)),
            "draft-for-outcomes": float(share * (draft + target) / max(draft * (1.0 + 1.0 / max(1.0, tokens)), target)),
        }


class _Trial:
    """Alternates another mode with ``sequential``, so that changes of the machine's speed affect both equally."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = [name, "sequential"] * TURNS  # modes of the remaining turns, the current one first
        self._done = {name: _Window(), "sequential": _Window()}

    def end_turn(self, measured: _Window) -> None:
        """Record the turn that has ended."""
        done = self._done[self.left.pop(0)]
        done.seconds, done.tokens = done.seconds + measured.seconds, done.tokens + measured.tokens

    @property
    def gain(self) -> float:
        """Speed of the other mode relative to ``sequential``."""
        before = self._done["sequential"].speed
        return self._done[self.name].speed / before if before else 0.0


@dataclass(frozen=True, slots=True)
class _CountedWindows:
    """Windows whose time is counted; refuted windows are never collected. Implements ``interfaces.WindowsAhead``."""

    windows: WindowsAhead
    counted: Callable[[], AbstractContextManager[None]]

    def draft(self, sequence: RequestState) -> int | None:
        """See ``WindowsAhead``."""
        with self.counted():
            return self.windows.draft(sequence)

    def submit(self, plan: SchedulerOutput, oldest_done: Callable[[], bool]) -> SubmittedStep:
        """See ``WindowsAhead``."""
        with self.counted():
            return self.windows.submit(plan, oldest_done)


class Auto:
    """Runs one execution mode at a time and chooses the mode."""

    learns: ClassVar[bool] = True

    def __init__(self, components: ModeComponents, window: int = WINDOW) -> None:
        self.components = components
        self.info = ExecutionInfo("sequential", "stage times are not measured yet")
        self._window_size = window
        self._mode: ExecutionMode = Sequential(components)
        self._measured = _Window()
        self._trial: _Trial | None = None
        self._settled = False
        self._outcomes = False  # some sequence can be drafted for after outcomes
        self._width = self._load = 0.0  # mean number of drafting sequences: recently, and when the mode was chosen

    @property
    def windows_ahead(self) -> WindowsAhead | None:
        """See ``ExecutionMode``; of the current mode."""
        windows = self._mode.windows_ahead
        return None if windows is None else _CountedWindows(windows, self._counted)

    @property
    def current(self) -> ExecutionMode:
        """The current execution mode."""
        return self._mode

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        """Submit one step in the current mode."""
        self._check_load(plan)
        if self._settled:
            return self._mode.submit(plan)
        self._look_for_outcomes(plan)
        if self._measured.steps >= self._window_size // (TURNS if self._trial else 1):
            self._decide()
        with self._counted():
            return self._mode.submit(plan)

    def collect(self, step: SubmittedStep) -> StepResult:
        """Wait for a submitted step; the mode may have changed since the submission."""
        if self._settled:
            return self._mode.collect(step)
        with self._counted():
            result = self._mode.collect(step)
        self._measure(result)
        return result

    def commit(self, commits: Sequence[Commit]) -> None:
        """Commit in the current mode."""
        if not self._settled:
            self._measured.tokens += sum(len(commit.tokens) for commit in commits)
            self._measured.verified += sum(commit.drafted > 0 for commit in commits)
            self._measured.gained += sum(len(commit.tokens) for commit in commits if commit.drafted)
            self._measured.fully_accepted += sum(commit.drafted > 0 and not commit.rejected for commit in commits)
        self._mode.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences in the current mode. Unknown ids are ignored."""
        self._mode.free(ids)

    def close(self) -> None:
        """Close the current mode."""
        self._mode.close()

    def _look_for_outcomes(self, plan: SchedulerOutput) -> None:
        """Note whether most sequences can be drafted for after outcomes. Steps in flight have windows ahead instead."""
        drafter, method = self.components.drafter, self.components.verifier.acceptance_method
        able = drafter is not None and drafter.drafts_ahead and drafter.drafts_for_outcomes
        kinds = [method(entry.sequence).stream_kind for entry in plan.entries if entry.budget.depth]
        if kinds:
            most = 2 * kinds.count(StreamKind.TARGET) > len(kinds)
            self._outcomes = able and most and self.components.verifier.max_in_flight == 1

    def _check_load(self, plan: SchedulerOutput) -> None:
        """Track the load, and start over when the load has changed."""
        if self.components.executor is None or not self.components.executor.parallel:
            return
        width = sum(entry.budget.depth > 0 for entry in plan.entries)
        if width:
            self._width += (width - self._width) / (self._window_size if self._width else 1)
        chosen = self._settled or self._trial is not None
        if chosen and not self._load / LOAD_CHANGE <= self._width <= self._load * LOAD_CHANGE:
            self._measured, self._trial, self._settled = _Window(), None, False
            self._switch("sequential")
            self._explain("the load has changed, so stage times are measured again")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the seconds of the block for the current mode, also where nothing collects what the block submits."""
        started = self.components.clock()
        yield
        self._measured.seconds += self.components.clock() - started

    def _measure(self, result: StepResult) -> None:
        drafted = sum(output.draft is not None for output in result.outputs)
        measured = self._measured
        # a trial ends also if the policy drafts for no sequence in this mode
        measured.steps += drafted > 0 or self._trial is not None
        if drafted:
            measured.stages.append((drafted, result.times.draft, result.times.target))

    def _decide(self) -> None:
        if self._trial is not None:
            self._finish_turn(self._trial)
            return
        measured, executor = self._measured, self.components.executor
        part = f"drafting takes {measured.share:.0%} of the time of drafting and verification"
        if executor is None or not executor.parallel:
            self._settle(f"{part}, but drafter and target share their hardware, so overlapping gains nothing")
            return
        gains = measured.predicted_gains()
        if not self._outcomes:
            del gains["draft-for-outcomes"]
        name, gain = max(gains.items(), key=lambda pair: pair[1])
        if gain < MIN_GAIN:
            self._settle(f"{part}, and overlapping promises {gain:.2f} times the speed at most")
            return
        self._trial, self._measured, self._load = _Trial(name), _Window(), self._width
        self._switch(name)
        self._explain(f"{part}; {name} promises {gain:.2f} times the speed, and alternates with sequential")

    def _finish_turn(self, trial: _Trial) -> None:
        """Record the turn of the current mode; start the next turn, or keep the faster mode."""
        trial.end_turn(self._measured)
        self._measured = _Window()
        if trial.left:
            self._switch(trial.left[0])
            return
        self._trial, gain = None, trial.gain
        self._switch(trial.name if gain > 1.0 else "sequential")
        compared = f"measured {gain:.2f} times the speed of sequential"
        self._settle(compared if gain > 1.0 else f"{trial.name} had {gain:.2f} times the speed of sequential")

    def _switch(self, name: str) -> None:
        """Switch to another mode."""
        if name == self.info.name:
            return
        self._mode.close()
        self._mode = _MODES[name](self.components)
        self.info = replace(self._mode.info, reason=self.info.reason)

    def _settle(self, reason: str) -> None:
        self._settled, self._load = True, self._width
        self._explain(reason)

    def _explain(self, reason: str) -> None:
        self.info = replace(self._mode.info, reason=reason)
        _log.info("execution mode %s: %s", self.info.name, reason)


def _interpolate(width: float, widths: Floats, seconds: Floats) -> float:
    """Return a stage's predicted time for ``width`` sequences.

    A line is fitted to the measured steps; the mean is used if all had the same width.
    """
    spread = widths - widths.mean()
    if not spread.any():
        return float(seconds.mean())
    slope = max(0.0, float(spread @ (seconds - seconds.mean()) / (spread @ spread)))
    return max(float(seconds.mean()) + slope * (width - float(widths.mean())), 0.0)
