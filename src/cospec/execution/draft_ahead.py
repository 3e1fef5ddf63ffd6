"""Draft further while a draft is being verified, as if all of the draft were accepted (PipeInfer, DSI)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.interfaces import ModeComponents
from cospec.core.types import Draft, ScheduledRequest
from cospec.execution.overlapped_base import OverlappedMode
from cospec.execution.windows_in_flight import WindowsInFlight
from cospec.runtime.executor_base import DRAFT_TIMEOUT


class DraftAhead(OverlappedMode):
    """Drafts and verifies a sequence at the same time::

        target   verify A0         verify A1         verify A2
        drafter  draft A1 | A0     draft A2 | A0 A1  ...

    If the target accepts all of a draft and its next token equals the drafter's next token, the following tokens are
    the next draft. Otherwise these tokens are dropped and the sequence is drafted again. The other sequences wait for
    this draft: a target reads its weights once for any number of sequences, so a step without this sequence would cost
    more.

    With several steps in flight the other sequences need the drafter during a verification, and a draft ahead would
    delay their drafts. So the drafter drafts ahead only for a sequence that runs alone. The target gets such a draft at
    once, as a further window of the sequence. ``WindowsInFlight`` has these drafts and windows.
    """

    name: ClassVar[str] = "draft-ahead"

    def __init__(self, components: ModeComponents, timeout: float = DRAFT_TIMEOUT) -> None:
        super().__init__(components, timeout)
        self._windows = WindowsInFlight(self.dispatcher)
        self.windows_ahead = self._windows if components.verifier.max_in_flight > 1 else None

    def select(self, entries: Sequence[ScheduledRequest]) -> tuple[Sequence[ScheduledRequest], Mapping[str, Draft]]:
        """Return all entries; submits drafts ahead for those with a draft."""
        dispatcher = self.dispatcher
        self._windows.forget([entry.sequence.id for entry in entries])
        dispatcher.draft_missing(entries)
        drafts = dispatcher.drafts_of(entries)
        if dispatcher.drafts_ahead:
            pairs = [(entry, draft) for entry in entries if (draft := drafts.get(entry.sequence.id))]
            ahead = [(draft, dispatcher.continue_draft(entry, draft)) for entry, draft in pairs]
            if self.windows_ahead is None:
                dispatcher.submit_drafts([request for _, request in ahead if request is not None])
            else:
                for draft, request in ahead:
                    self._windows.follow(draft, request)
        return entries, drafts

    def free(self, ids: Sequence[str]) -> None:
        """See ``OverlappedMode``."""
        self._windows.forget(ids)
        super().free(ids)
