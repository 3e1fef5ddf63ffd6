"""What replicas report of themselves, and the counts of a cluster, which outlive a replica."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from cospec.core.interfaces import Clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica, now.

    Attributes:
        name: of the actor.
        serves: whether the engine serves and makes progress.
        engine_restarts: engine processes after the first one.
        stage_host_restarts: starts of stage hosts after the first ones.
        leaves: whether the replica ends by a decision of Ray Serve, with all its requests finished.
    """

    name: str
    serves: bool
    engine_restarts: int = 0
    stage_host_restarts: int = 0
    leaves: bool = False


class ReplicaReports:
    """The latest report of each replica that runs, and sums over all replicas since the start.

    Args:
        patience: seconds after which a report is too old to say that a replica serves.

    Attributes:
        lost: replicas that ended without a report that they leave.
    """

    def __init__(self, patience: float, clock: Clock = time.monotonic) -> None:
        self._patience, self._clock, self._start = patience, clock, clock()
        self._latest: dict[str, tuple[ReplicaReport, float]] = {}
        self._ended: set[str] = set()
        self._engine_restarts = self._stage_host_restarts = 0  # of replicas that ended
        self.lost = 0

    @property
    def serves(self) -> bool:
        """Whether a replica serves. Before the first report one does: the API server has waited for a replica."""
        oldest = self._clock() - self._patience
        if not self._latest:
            return self._start >= oldest
        return any(report.serves and at >= oldest for report, at in self._latest.values())

    @property
    def engine_restarts(self) -> int:
        """Of all replicas, also of those that ended."""
        return self._engine_restarts + sum(report.engine_restarts for report, _ in self._latest.values())

    @property
    def stage_host_restarts(self) -> int:
        """Of all replicas, also of those that ended."""
        return self._stage_host_restarts + sum(report.stage_host_restarts for report, _ in self._latest.values())

    def note(self, report: ReplicaReport) -> None:
        """Take a report in place of the replica's report before; a late report lowers no count."""
        if report.name in self._ended:
            return
        before, _ = self._latest.get(report.name, (report, 0.0))
        report = replace(
            report,
            engine_restarts=max(before.engine_restarts, report.engine_restarts),
            stage_host_restarts=max(before.stage_host_restarts, report.stage_host_restarts),
            leaves=before.leaves or report.leaves,
        )
        self._latest[report.name] = report, self._clock()

    def keep(self, running: Collection[str]) -> None:
        """Move the counts of replicas that ended to the sums.

        Args:
            running: names of all actors that run.
        """
        for name in self._latest.keys() - running:
            report, _ = self._latest.pop(name)
            self._ended.add(name)
            self._engine_restarts += report.engine_restarts
            self._stage_host_restarts += report.stage_host_restarts
            if not report.leaves:
                self.lost += 1
                log.warning("the replica %s is lost", name)
