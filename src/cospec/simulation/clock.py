"""A clock that work advances, and simulated machines of drafters and of a pipelined target."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Protocol

from cospec.config import LinkConfig
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.distributed.links import LinkClock
from cospec.errors import DrafterLost

SAME = 1e-12  # seconds of rounding error between equal moments
MESSAGE_BYTES = 256  # of a message between target and drafter, for a link with a bandwidth


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

    @contextmanager
    def elsewhere(self, moment: float) -> Iterator[None]:
        """Work on another machine from ``moment`` on, at full speed; then return to the present."""
        before = self.now, self._left, self._factor
        self.now, self._left, self._factor = moment, math.inf, 1.0
        try:
            yield
        finally:
            self.now, self._left, self._factor = before


class Outages:
    """The times at which a machine is not there.

    Args:
        spans: ``(begin, end)`` in seconds; those that overlap or touch are one outage.
    """

    def __init__(self, spans: Sequence[tuple[float, float]] = ()) -> None:
        self._spans = list[tuple[float, float]]()
        for begin, end in sorted(spans):
            if self._spans and begin <= self._spans[-1][1]:
                begin, end = self._spans[-1][0], max(self._spans.pop()[1], end)
            self._spans.append((begin, end))

    def end(self, moment: float) -> float:
        """Return when the machine is there again; ``moment`` where no outage is then."""
        return next((end for begin, end in self._spans if begin <= moment < end), moment)

    def begun(self, moment: float) -> int:
        """Return the number of outages that have begun."""
        return sum(begin <= moment for begin, _ in self._spans)

    def first(self, after: float, before: float) -> float | None:
        """Return the begin of the first outage between two moments."""
        return next((begin for begin, _ in self._spans if after < begin < before), None)


NO_OUTAGES = Outages()


class SimulatedWorker(Protocol):
    """A drafter whose proposals advance the clock."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """See ``Drafter.propose``; advances the clock."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """See ``Drafter.commit``."""

    def free(self, ids: Sequence[str]) -> None:
        """See ``Drafter.free``."""


class SimulatedFuture:
    """A result, or an error, that is available from a known moment on."""

    def __init__(self, clock: VirtualClock, moment: float, value: Any = None, error: Exception | None = None) -> None:
        self._clock, self._moment, self._value, self._error = clock, moment, value, error

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
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> None:
        """Do nothing: simulated machines finish what they have begun."""


class SimulatedPipeline:
    """Stages in a row. Each stage works on one microbatch at a time, in their order, and does not wait for its link.

    Args:
        links: between neighbouring stages, one fewer than stages.
    """

    def __init__(self, clock: VirtualClock, links: Sequence[LinkClock]) -> None:
        self._clock, self._links = clock, links
        self._free_at = [0.0] * (len(links) + 1)

    @property
    def free_at(self) -> float:
        """When the last stage has no more work."""
        return self._free_at[-1]

    def enter(self, microbatches: int, seconds: float, num_bytes: int) -> float:
        """Start microbatches that take ``seconds`` in every stage; return when the last microbatch leaves.

        Args:
            num_bytes: of the message of a microbatch between two stages.
        """
        for _ in range(microbatches):
            moment = self._clock.now
            for stage, free in enumerate(self._free_at):
                arrival = self._links[stage - 1].arrival(moment, num_bytes) if stage else moment
                moment = self._free_at[stage] = max(arrival, free) + seconds
        return self.free_at


class SimulatedExecutor:
    """An executor of one drafter on ``nodes`` machines: each batch goes to the machine that is free first.

    Args:
        link: between the target and the machine, in each direction, for ``nodes`` 1; None takes no time. Messages about
            commits take no time.
        outages: the machines fail, and forget everything.

    Attributes:
        busy: seconds of proposals.
    """

    parallel = True
    weights: Mapping[str, float] = {}

    def __init__(
        self,
        worker: SimulatedWorker,
        clock: VirtualClock,
        nodes: int = 1,
        link: LinkConfig | None = None,
        outages: Outages = NO_OUTAGES,
    ) -> None:
        self.busy = 0.0
        self._ids, self._met = set[str](), 0  # sequences that the machines know, and outages that have begun
        self._worker, self._clock, self._outages = worker, clock, outages
        self._links = None if link is None else (LinkClock(link, 2 * link.seed), LinkClock(link, 2 * link.seed + 1))
        self._free_at = [0.0] * nodes

    @property
    def present(self) -> bool:
        """Whether no machine is in an outage."""
        return self._outages.end(self._clock.now) == self._clock.now

    @property
    def load(self) -> float:
        """1 while every machine drafts, else 0."""
        return float(min(self._free_at) > self._clock.now)

    def submit(self, method: str, *args: Any) -> SimulatedFuture:
        """Start a call, which runs in parallel with the target; a call that meets an outage is lost."""
        clock = self._clock
        if method in ("commit", "free"):
            return SimulatedFuture(clock, clock.now, getattr(self._worker, method)(*args))
        if not self.present:
            return SimulatedFuture(clock, clock.now, error=DrafterLost("The drafter's machine is not there."))
        self._forget(args[0])
        arrival = self._arrival(0, clock.now)
        start = max(arrival, heapq.heappop(self._free_at))
        with clock.elsewhere(start):
            answer = getattr(self._worker, method)(*args)
            done = clock.now
        lost = self._outages.first(clock.now, done)
        if lost is not None:
            heapq.heappush(self._free_at, self._outages.end(lost))
            self.busy += max(0.0, lost - start)
            return SimulatedFuture(clock, lost, error=DrafterLost("The drafter's machine failed."))
        heapq.heappush(self._free_at, done)
        self.busy += done - start
        return SimulatedFuture(clock, self._arrival(1, done), answer)

    def _arrival(self, direction: int, moment: float) -> float:
        """Return when a message arrives that is sent at ``moment``: 0 to the machine, 1 from it."""
        return moment if self._links is None else self._links[direction].arrival(moment, MESSAGE_BYTES)

    def close(self) -> None:
        """Nothing to close."""

    def _forget(self, contexts: Sequence[DraftContext]) -> None:
        """After an outage the drafter reads every sequence again."""
        met = self._outages.begun(self._clock.now)
        if met > self._met:
            self._worker.free(sorted(self._ids))
            self._ids, self._met = set(), met
        self._ids.update(context.id for context in contexts)
