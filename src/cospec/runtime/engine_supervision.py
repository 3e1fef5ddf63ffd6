"""Supervises the engine process: when the process counts as frozen, and when a dead process is restarted. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

TIMEOUT = 120.0  # seconds
MAX_RESTARTS = 6
KILL_FACTOR = 3  # a process without progress for so many time-outs is killed
HEALTHY_SECONDS = 60.0  # of service, after which earlier deaths no longer count
FIRST_DELAY = 0.5  # seconds before the first restart; each further restart waits twice as long
MAX_DELAY = 30.0
START_FACTOR = 5  # a restart that takes so many times as long as the first start is ended
TICKS = 8  # looks at the progress counter per time-out


@dataclass(frozen=True, slots=True)
class Supervision:
    """How an engine process is watched.

    A step is the smallest unit of progress. A prefill step of 2,048 tokens of an 8 B model takes up to five minutes
    on a slow processor. The defaults therefore report such a step as unhealthy at most, and never kill the process.

    Attributes:
        timeout: seconds without progress after which the engine counts as frozen. ``KILL_FACTOR`` times as many
            seconds without progress end the process. At least 2, because an idle engine makes one step a second.
        max_restarts: restarts in a row; an engine that served for ``HEALTHY_SECONDS`` begins a new row.
    """

    timeout: float = TIMEOUT
    max_restarts: int = MAX_RESTARTS

    @property
    def tick(self) -> float:
        """Seconds between two looks at the progress counter."""
        return min(1.0, self.timeout / TICKS)

    def restart_limit(self, first: float) -> float:
        """Return the seconds that a restart may take, from the seconds of the first start, which has no limit.

        A first start may load files over a network.
        """
        return max(self.timeout * KILL_FACTOR, first * START_FACTOR)


DEFAULT = Supervision()


class ProgressMonitor:
    """Measures for how long a progress counter has stood still.

    Time counts only as far as the observer looked: a pause of the observer itself is no pause of the engine.
    """

    def __init__(self, supervision: Supervision) -> None:
        self._supervision = supervision
        self._seen = -1
        self._silent = 0.0

    def observe(self, count: int) -> None:
        """Take one look, ``Supervision.tick`` seconds after the look before."""
        if count != self._seen:
            self._seen, self._silent = count, 0.0
        else:
            self._silent += self._supervision.tick

    @property
    def frozen(self) -> bool:
        """Whether the engine counts as frozen."""
        return self._silent >= self._supervision.timeout

    @property
    def hopeless(self) -> bool:
        """Whether the process is to be killed."""
        return self._silent >= self._supervision.timeout * KILL_FACTOR


class RestartPolicy:
    """Exponential back-off between restarts, up to a number of restarts in a row."""

    def __init__(self, supervision: Supervision) -> None:
        self._most = supervision.max_restarts
        self.deaths = 0  # in a row

    def died(self, served: float) -> float | None:
        """Note a death after ``served`` seconds of service.

        Returns:
            Seconds to wait before the restart; None when the process has died too often.
        """
        self.deaths = 1 if served >= HEALTHY_SECONDS else self.deaths + 1
        if self.deaths > self._most:
            return None
        return float(min(FIRST_DELAY * 2 ** (self.deaths - 1), MAX_DELAY))
