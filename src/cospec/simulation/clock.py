"""Time that passes only when somebody works, and a drafter that works beside."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Protocol

from cospec.core.types import Commit, Draft, DraftBudget, DraftContext

SAME = 1e-12  # seconds that rounding may make of one moment


class VirtualClock:
    """A ``Clock``: seconds since the start of a simulation.

    Args:
        pace: what a machine that is not always equally fast makes of work: ``(seconds, factor)`` says that so much work
            takes so many times as long. One after the other, again and again.
    """

    def __init__(self, pace: Sequence[tuple[float, float]] = ()) -> None:
        self.now = 0.0
        self._pace = cycle(pace or [(math.inf, 1.0)])
        self._left, self._factor = next(self._pace)

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Somebody works, and the others wait for it; the time that passes."""
        began = self.now
        while seconds > self._left:
            self.now += self._left * self._factor
            seconds -= self._left
            self._left, self._factor = next(self._pace)
        self._left -= seconds
        self.now += seconds * self._factor
        return self.now - began

    def reach(self, moment: float) -> None:
        """Wait until ``moment``; nothing happens when it is past."""
        self.now = max(self.now, moment)


class SimulatedWorker(Protocol):
    """A drafter that knows beforehand how long it will take."""

    def seconds(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> float:
        """For a proposal; what it has to catch up on counts as done from then on."""

    def drafts(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """The proposal itself, at no time."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """See ``Drafter.commit``."""

    def free(self, ids: Sequence[str]) -> None:
        """See ``Drafter.free``."""


class SimulatedFuture:
    """A result that is there from a known moment on."""

    def __init__(self, clock: VirtualClock, moment: float, value: Any) -> None:
        self._clock, self._moment, self._value = clock, moment, value

    def done(self) -> bool:
        """Whether that moment has come."""
        return self._clock.now >= self._moment - SAME

    def result(self, timeout: float | None = None) -> Any:
        """Wait until then.

        Raises:
            TimeoutError: it is further away than ``timeout``.
        """
        if timeout is not None and self._moment - self._clock.now > timeout:
            self._clock.reach(self._clock.now + timeout)
            raise TimeoutError
        self._clock.reach(self._moment)
        return self._value


class SimulatedExecutor:
    """A handle of drafters on ``nodes`` machines of their own: each batch goes to the node that is free first."""

    parallel, present = True, True

    def __init__(self, worker: SimulatedWorker, clock: VirtualClock, nodes: int = 1) -> None:
        self.busy = 0.0
        self._worker, self._clock = worker, clock
        self._free_at = [0.0] * nodes

    def submit(self, method: str, *args: Any) -> SimulatedFuture:
        """Drafting takes the time that it takes, beside everything else; word of commits takes none."""
        if method != "propose":
            return SimulatedFuture(self._clock, self._clock.now, getattr(self._worker, method)(*args))
        seconds = self._worker.seconds(*args)
        done = max(self._clock.now, heapq.heappop(self._free_at)) + seconds
        heapq.heappush(self._free_at, done)
        self.busy += seconds
        return SimulatedFuture(self._clock, done, self._worker.drafts(*args))

    def close(self) -> None:
        """There is nothing to end."""
