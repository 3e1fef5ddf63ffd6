"""Run drafter and target at the same time on different sequences (Minions 3.4, CoSine 4.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import ClassVar

from cospec.core.types import Draft, ScheduledRequest
from cospec.execution.overlapped_base import OverlappedMode


class Pipelined(OverlappedMode):
    """Drafts for one half of the sequences while the target verifies the other half::

        target   verify A      verify B      verify A
        drafter  draft B       draft A       draft B

    The planned sequences are the request pool. A full target batch is half of the speculating sequences, or all of them
    without a drafter. The drafter makes one batch of drafts at a time: two smaller batches would stay apart, each
    would take a step of its own, and the others would wait. Sequences that need no draft are verified in every step.

    Where the verifier takes several steps at a time, a plan is already one of as many microbatches. The drafter drafts
    for the whole microbatch while the target verifies the others. A part would occupy the stages nearly as long.
    """

    name: ClassVar[str] = "pipelined"

    @property
    def groups(self) -> int:
        """Two halves, or whole microbatches."""
        return 2 if self.components.verifier.max_in_flight == 1 else 1

    def select(self, entries: Sequence[ScheduledRequest]) -> tuple[Sequence[ScheduledRequest], Mapping[str, Draft]]:
        """Return the oldest sequences that have a draft, and those that need none."""
        dispatcher = self.dispatcher
        if self.groups == 1:
            dispatcher.draft_missing(entries)
            return entries, dispatcher.drafts_of(entries)
        speculated = sum(entry.budget.depth > 0 for entry in entries)
        full = ceil(speculated / self.groups) if dispatcher.available else speculated
        while not (batch := self._batch(entries, full)):
            self._draft(entries, full)
            dispatcher.wait()
        drafts = dispatcher.drafts_of(batch)
        verified = {entry.sequence.id for entry in batch}
        self._draft([entry for entry in entries if entry.sequence.id not in verified], full)
        return batch, drafts

    def _draft(self, entries: Sequence[ScheduledRequest], full: int) -> None:
        """Submit drafts up to one full target batch, unless drafts of these sequences are pending (back-pressure)."""
        dispatcher = self.dispatcher
        waiting = [entry for entry in entries if dispatcher.waits_for_draft(entry)]
        ready = sum(entry.budget.depth > 0 for entry in entries) - len(waiting)
        if all(map(dispatcher.needs_draft, waiting)):
            dispatcher.submit_drafts(
                [dispatcher.continue_committed(entry) for entry in waiting[: max(0, full - ready)]]
            )

    def _batch(self, entries: Sequence[ScheduledRequest], full: int) -> list[ScheduledRequest]:
        """Return sequences that need no draft, and the oldest of those that have one."""
        batch = []
        for entry in entries:
            drafted = entry.budget.depth > 0
            if self.dispatcher.waits_for_draft(entry) or (drafted and full == 0):
                continue
            batch.append(entry)
            full -= drafted
        return batch
