"""Drafters and target at the same time, on different sequences (spec section 6; Minions 3.4, CoSine 4.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.types import Draft, ScheduledRequest
from cospec.execution.overlapped import OverlappedMode


class Pipelined(OverlappedMode):
    """While the target verifies one half of the sequences, the other half is drafted for::

        target   verify A      verify B      verify A
        drafter  draft B       draft A       draft B

    The planned sequences are the request pool. A full target batch is half of those that are speculated for, all of
    them where nobody drafts; drafters pause while so many drafts wait or are being made, and start as soon as the
    target takes some. Sequences that need no draft are verified in every round.
    """

    name: ClassVar[str] = "pipelined"

    def choose(self, entries: Sequence[ScheduledRequest]) -> tuple[Sequence[ScheduledRequest], Mapping[str, Draft]]:
        """The oldest sequences that have a draft, and those that need none."""
        desk = self.desk
        speculated = sum(entry.budget.depth > 0 for entry in entries)
        full = (speculated + 1) // 2 if desk.attended else speculated
        self._draft(entries, full)
        while not (batch := self._batch(entries, full)):
            desk.wait()
        drafts = desk.drafts_of(batch)
        verified = {entry.sequence.id for entry in batch}
        self._draft([entry for entry in entries if entry.sequence.id not in verified], full)
        return batch, drafts

    def _draft(self, entries: Sequence[ScheduledRequest], full: int) -> None:
        """Keep the drafters busy up to a full target batch: back-pressure."""
        desk = self.desk
        drafted = sum(entry.budget.depth > 0 and not desk.needs(entry) for entry in entries)
        if drafted < full:
            desk.ask([desk.fresh(entry) for entry in entries if desk.needs(entry)][: full - drafted])

    def _batch(self, entries: Sequence[ScheduledRequest], full: int) -> list[ScheduledRequest]:
        """Sequences that need no draft, and the oldest of those that have one."""
        batch = []
        for entry in entries:
            drafted = entry.budget.depth > 0
            if self.desk.waits_for(entry) or (drafted and full == 0):
                continue
            batch.append(entry)
            full -= drafted
        return batch
