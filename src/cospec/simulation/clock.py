"""A clock that work advances, and simulated machines of drafters and of a pipelined target."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Protocol

from cospec.core.types import Commit, Draft, DraftBudget, DraftContext

SAME = 1e-12  # seconds of rounding error between equal moments


class VirtualClock:
    """A ``Clock``: seconds since the start of a simulation.

    Args:
        pace: speed of the machine as repeated ``(seconds, factor)``: so much work takes ``factor`` times as long.
    """

    def __init__(self, pace: Sequence[tuple[float, float]] = ()) -> None:
        self.now = 0.0
        self._pace = cycle(pace or [(math.inf, 1.0)])
        self._left, self._factor = next(self._pace)

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Advance the clock by blocking work; return the time that passes."""
        began = self.now
        while seconds > self._left:
            self.now += self._left * self._factor
            seconds -= self._left
            self._left, self._factor = next(self._pace)
        self._left -= seconds
        self.now += seconds * self._factor
        return self.now - began

    def reach(self, moment: float) -> None:
        """Wait until ``moment``; a past moment changes nothing."""
        self.now = max(self.now, moment)


class SimulatedWorker(Protocol):
    """A drafter that knows the duration of its drafts in advance."""

    def seconds(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> float:
        """Return the seconds of a proposal; pending context counts as processed afterwards."""

    def drafts(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return the drafts, without advancing the clock."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """See ``Drafter.commit``."""

    def free(self, ids: Sequence[str]) -> None:
        """See ``Drafter.free``."""


class SimulatedFuture:
    """A result that is available from a known moment on."""

    def __init__(self, clock: VirtualClock, moment: float, value: Any) -> None:
        self._clock, self._moment, self._value = clock, moment, value

    def done(self) -> bool:
        """Whether the moment has passed."""
        return self._clock.now >= self._moment - SAME

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the moment and return the result.

        Raises:
            TimeoutError: the moment is further away than ``timeout``.
        """
        if timeout is not None and self._moment - self._clock.now > timeout:
            self._clock.reach(self._clock.now + timeout)
            raise TimeoutError
        self._clock.reach(self._moment)
        return self._value


class SimulatedPipeline:
    """Stages in a row. Each stage works on one microbatch at a time, in their order.

    Attributes:
        busy: seconds in which any stage worked.
    """

    def __init__(self, clock: VirtualClock, stages: int) -> None:
        self.busy = 0.0
        self._clock, self._free_at = clock, [0.0] * stages

    def enter(self, microbatches: int, seconds: float) -> float:
        """Start microbatches that take ``seconds`` in every stage; return when the last microbatch leaves."""
        before = max(self._clock.now, self._free_at[-1])
        for _ in range(microbatches):
            moment = self._clock.now
            for stage, free in enumerate(self._free_at):
                moment = self._free_at[stage] = max(moment, free) + seconds
        self.busy += self._free_at[-1] - before
        return self._free_at[-1]


class SimulatedExecutor:
    """An executor of drafters on ``nodes`` machines: each batch goes to the machine that is free first."""

    parallel, present = True, True

    def __init__(self, worker: SimulatedWorker, clock: VirtualClock, nodes: int = 1) -> None:
        self.busy = 0.0
        self._worker, self._clock = worker, clock
        self._free_at = [0.0] * nodes

    @property
    def load(self) -> float:
        """1 while every machine drafts, else 0."""
        return float(min(self._free_at) > self._clock.now)

    def submit(self, method: str, *args: Any) -> SimulatedFuture:
        """Start drafting, which runs in parallel with the target; messages about commits take no time."""
        if method != "propose":
            return SimulatedFuture(self._clock, self._clock.now, getattr(self._worker, method)(*args))
        seconds = self._worker.seconds(*args)
        done = max(self._clock.now, heapq.heappop(self._free_at)) + seconds
        heapq.heappush(self._free_at, done)
        self.busy += seconds
        return SimulatedFuture(self._clock, done, self._worker.drafts(*args))

    def close(self) -> None:
        """Nothing to close."""
