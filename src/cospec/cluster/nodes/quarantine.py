"""Quarantines and pauses of keys, and the counts of nodes: what the verifier remembers after connections.

A key is the public key of a connection; without encryption each connection counts as a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cospec.core.interfaces import Clock

QUARANTINE_SECONDS = 60.0  # doubled for each time that a node of the same key broke the protocol
MOST_KEYS = 256  # of which something is remembered, besides keys in quarantine
MOST_NAMES = 256  # of nodes that are counted by name
OTHERS = "others"  # the name that counts further nodes

Counted = tuple[str, str, Mapping[str, float]]
"""Node, drafter and counts of a connection."""


@dataclass(slots=True)
class NodeKeyRecord:
    """What the node of one key did.

    Attributes:
        times: how often the node broke the protocol.
        until: end of the quarantine.
        status: of the excluded node, see ``NodeHub.status``.
        pause: that of ``NodeSession``, of a node that left.
    """

    times: int = 0
    until: float = 0.0
    status: dict[str, Any] | None = None
    pause: float = 0.0


class NodeKeyRecords:
    """The records of all keys."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, NodeKeyRecord] = {}

    def excluded(self, key: str) -> bool:
        """Whether the key is in quarantine."""
        return key in self._records and self._clock() < self._records[key].until

    def exclude(self, key: str, status: dict[str, Any] | None) -> float:
        """Begin a quarantine; returns its seconds. ``status`` is that of the key's node, if the node had joined."""
        record = self._record(key)
        seconds = QUARANTINE_SECONDS * float(1 << min(record.times, 6))
        record.times, record.until, record.status = record.times + 1, self._clock() + seconds, status
        return seconds

    def statuses(self) -> list[dict[str, Any]]:
        """The statuses of nodes in quarantine."""
        now = self._clock()
        return [each.status for each in self._records.values() if each.status is not None and now < each.until]

    def keep_pause(self, key: str, pause: float) -> None:
        """Remember how long a late node of the key is not asked; 0: the node was in time."""
        if pause or key in self._records:
            self._record(key).pause = pause

    def pause(self, key: str) -> float:
        """The remembered pause; 0 without a late node."""
        return self._records[key].pause if key in self._records else 0.0

    def _record(self, key: str) -> NodeKeyRecord:
        if key not in self._records and len(self._records) >= MOST_KEYS:
            now = self._clock()
            self._records = {name: record for name, record in self._records.items() if now < record.until}
        return self._records.setdefault(key, NodeKeyRecord())


class NodeTotals:
    """Counts by node and drafter. No count is lost when a node dies or joins again."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], dict[str, float]] = {}

    def end(self, counted: Counted) -> None:
        """Keep the counts of a connection that ends."""
        node, drafter, _ = counted
        known = (node, drafter) in self._ended or len(self._ended) < MOST_NAMES
        _add(self._ended, counted if known else (OTHERS, drafter, counted[2]))

    def rows(self, live: Iterable[Counted]) -> list[dict[str, Any]]:
        """One object per node and drafter: counts of ended and ``live`` connections."""
        sums = {names: dict(counts) for names, counts in self._ended.items()}
        for each in live:
            _add(sums, each)
        return [{"node": node, "drafter": drafter, **counts} for (node, drafter), counts in sums.items()]


def _add(sums: dict[tuple[str, str], dict[str, float]], counted: Counted) -> None:
    node, drafter, counts = counted
    before = sums.setdefault((node, drafter), {})
    for name, count in counts.items():
        before[name] = before.get(name, 0) + count
