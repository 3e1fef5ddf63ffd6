"""Draft further while the draft is being verified, as if all of it were accepted (spec section 6; PipeInfer, DSI)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.types import Draft, ScheduledRequest
from cospec.execution.overlapped import OverlappedMode


class DraftAhead(OverlappedMode):
    """A sequence is drafted and verified at once::

        target   verify A0         verify A1         verify A2
        drafter  draft A1 | A0     draft A2 | A0 A1  ...

    When all of a draft was accepted and the next token is the one that the drafter went on with, what it wrote behind
    that is the next draft. Otherwise it is dropped and the sequence drafted anew, for which the others wait: a target
    reads its weights for one sequence as for many, so they would lose more by going on without it.
    """

    name: ClassVar[str] = "draft-ahead"

    def choose(self, entries: Sequence[ScheduledRequest]) -> tuple[Sequence[ScheduledRequest], Mapping[str, Draft]]:
        """Everybody; those whose draft is a chain are drafted further meanwhile."""
        desk = self.desk
        while any(desk.waits_for(entry) for entry in entries):
            desk.ask([desk.fresh(entry) for entry in entries if desk.needs(entry)])
            desk.wait()
            for entry in entries:
                desk.pool.review(entry)
        drafts = desk.drafts_of(entries)
        if desk.drafts_ahead:
            chains = [
                (entry, draft) for entry in entries if (draft := drafts.get(entry.sequence.id)) and draft.is_chain
            ]
            desk.ask([ask for entry, draft in chains if (ask := desk.ahead(entry, draft)) is not None])
        return entries, drafts
