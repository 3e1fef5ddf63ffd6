"""Several windows of one sequence in flight, so that no stage of a target waits (PipeInfer 3.2, DSD 2.2).

A window continues the window before, as if all of its draft were accepted and the next token were guessed right::

    window 1   x   d1 d2 d3         known token, draft
    window 2       g  d5 d6 d7      guess of the token after d3, draft
    window 3           g  d9 ...

The target computes windows in their order, so window 2 attends to the cache entries of window 1. When the engine
commits window 1 with another outcome, all later windows of the sequence are refuted. The engine drops their outputs,
cancels their steps, and submits a window after the committed tokens. The pipeline computes this window after the
refuted windows, whose cache entries the window overwrites.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cospec.core.submitted_step import SubmittedStep
from cospec.core.types import Draft, ScheduledRequest, SchedulerOutput
from cospec.execution.draft_buffer import DraftRequest
from cospec.execution.draft_dispatcher import DraftDispatcher

OVERLAP = "a window of the same request is in flight"


class WindowsInFlight:
    """Implements ``interfaces.WindowsAhead``."""

    def __init__(self, dispatcher: DraftDispatcher) -> None:
        self._dispatcher = dispatcher
        self._next: dict[str, DraftRequest] = {}  # the draft after the latest window of each sequence

    def forget(self, entries: Iterable[ScheduledRequest]) -> None:
        """Forget sequences that are in flight no more; their next window is the first again."""
        for entry in entries:
            self._next.pop(entry.sequence.id, None)

    def follow(self, drafts: Mapping[str, Draft], requests: Iterable[DraftRequest]) -> None:
        """Note the draft requests that continue submitted windows, as far as the windows are chains."""
        for request in requests:
            if not request.rank and drafts[request.id].is_chain:
                self._next[request.id] = request

    def lengths(self) -> Mapping[str, int]:
        """See ``WindowsAhead``."""
        pending, ready = self._dispatcher.buffer.pending, self._dispatcher.buffer.ready
        self._next = {
            id: request
            for id, request in self._next.items()
            if pending.get(id) is request or ready.get(id, (None,))[0] is request
        }
        return {id: len(request.context.tokens) + 1 for id, request in self._next.items()}

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        """See ``WindowsAhead``."""
        dispatcher, entries, found = self._dispatcher, list[ScheduledRequest](), list[Draft]()
        for entry in plan.entries:
            request = self._next.pop(entry.sequence.id)
            while dispatcher.buffer.pending.get(request.id) is request:
                dispatcher.wait()
            window = dispatcher.buffer.take_window(entry, request)
            if window is not None:
                entries.append(replace(entry, assumed=window[0]))
                found.append(window[1])
        drafts = dispatcher.trimmed(found)
        pairs = [(entry, draft) for entry in entries if (draft := drafts.get(entry.sequence.id)) is not None]
        following = [dispatcher.continue_draft(entry, draft) for entry, draft in pairs]
        requests = [request for request in following if request is not None]
        dispatcher.submit_drafts(requests)
        self.follow(drafts, requests)
        return dispatcher.submit(entries, drafts, OVERLAP)
