"""Times of an engine's steps: for the target, for drafts, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from benchmarks.papers.step_parts import StepParts
from cospec.core.engine import Engine
from cospec.core.stats import RequestStats
from cospec.core.submitted_step import SubmittedStep
from cospec.core.types import SchedulerOutput


class StepTimes:
    """Measures how long the engine's thread waits for drafts: the time of submissions without that of the target.

    While a further window of a request waits for its draft, the window before is verified. This time counts as
    verification; under ``auto``, whose windows are new objects at each access, as the rest.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._steps, self._windows = engine, 0.0, 0.0
        mode = engine.execution_mode
        self._submit_step, windows = mode.submit, mode.windows_ahead
        mode.submit = self._step  # type: ignore[method-assign]
        if windows is not None and windows is mode.windows_ahead:
            self._submit_window = windows.submit
            windows.submit = self._window  # type: ignore[method-assign]
        metrics = engine.metrics()
        self._before = metrics.steps, metrics.target_seconds, metrics.cancelled_steps

    def cancelled(self) -> int:
        """Steps that were cancelled, because earlier steps refuted their windows."""
        return self._engine.metrics().cancelled_steps - self._before[2]

    def parts(self, seconds: float, tokens: int, stats: Sequence[RequestStats]) -> StepParts:
        """Return the parts of a run of ``seconds`` from the start on, in which requests wrote ``tokens``."""
        metrics, calls = self._engine.metrics(), sum(each.target_calls for each in stats)
        steps, verification = metrics.steps - self._before[0], metrics.target_seconds - self._before[1] + self._windows
        rest = seconds - verification - self._steps
        return StepParts(steps, calls / steps, tokens / calls, verification / steps, self._steps / steps, rest / steps)

    def _step(self, plan: SchedulerOutput) -> SubmittedStep:
        step, seconds = _timed(partial(self._submit_step, plan))
        self._steps += seconds
        return step

    def _window(self, plan: SchedulerOutput, oldest_done: Callable[[], bool]) -> SubmittedStep:
        step, seconds = _timed(partial(self._submit_window, plan, oldest_done))
        self._windows += seconds
        return step


def _timed(submit: Callable[[], SubmittedStep]) -> tuple[SubmittedStep, float]:
    """A submitted step, and the seconds of its submission without those of the target."""
    started = monotonic()
    step = submit()
    return step, monotonic() - started - step.times.target
