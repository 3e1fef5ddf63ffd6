"""Run drafter and target at the same time on different sequences (Minions 3.4, CoSine 4.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.types import Draft, ScheduledRequest
from cospec.execution.overlapped_base import OverlappedMode


class Pipelined(OverlappedMode):
    """Drafts for one half of the sequences while the target verifies the other half::

        target   verify A      verify B      verify A
        drafter  draft B       draft A       draft B

    The planned sequences are the request pool. A full target batch is half of the speculating sequences, or all of them
    without a drafter. The drafter pauses while a full batch of drafts is pending or ready. Sequences that need no draft
    are verified in every step.

    Where the verifier takes several steps at a time, a plan is already one of as many microbatches. The drafter drafts
    for the whole microbatch while the target verifies the others. A part would occupy the stages nearly as long.
    """

    name: ClassVar[str] = "pipelined"

    def select(self, entries: Sequence[ScheduledRequest]) -> tuple[Sequence[ScheduledRequest], Mapping[str, Draft]]:
        """Return the oldest sequences that have a draft, and those that need none."""
        dispatcher = self.dispatcher
        if self.components.verifier.max_in_flight > 1:
            self._draft(entries, len(entries))
            while any(map(dispatcher.waits_for_draft, entries)):
                dispatcher.wait()
            return entries, dispatcher.drafts_of(entries)
        speculated = sum(entry.budget.depth > 0 for entry in entries)
        full = (speculated + 1) // 2 if dispatcher.available else speculated
        self._draft(entries, full)
        while not (batch := self._batch(entries, full)):
            dispatcher.wait()
        drafts = dispatcher.drafts_of(batch)
        verified = {entry.sequence.id for entry in batch}
        self._draft([entry for entry in entries if entry.sequence.id not in verified], full)
        return batch, drafts

    def _draft(self, entries: Sequence[ScheduledRequest], full: int) -> None:
        """Submit drafts up to one full target batch (back-pressure)."""
        dispatcher = self.dispatcher
        drafted = sum(entry.budget.depth > 0 and not dispatcher.needs_draft(entry) for entry in entries)
        if drafted < full:
            dispatcher.submit_drafts(
                [dispatcher.continue_committed(entry) for entry in entries if dispatcher.needs_draft(entry)][
                    : full - drafted
                ]
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
