"""Several windows of one sequence in flight, so that no stage of a target waits (PipeInfer 3.2, DSD 2.2).

A window continues the window before, as if all of its draft were accepted and the next token were guessed right::

    window 1   x   d1 d2 d3         known token, draft
    window 2       g  d5 d6 d7      guess of the token after d3, draft
    window 3           g  d9 ...

The target computes windows in their order, so window 2 attends to the cache entries of window 1. When the engine
commits window 1 with another outcome, all later windows of the sequence are refuted. The engine drops their outputs,
cancels their steps, and submits a window after the committed tokens. The pipeline computes this window after the
refuted windows, whose cache entries the window overwrites.

A refuted window delays the next valid window by the time of one stage. A valid window saves the time of all stages. So
a window is submitted where it is valid with a probability of at least 1 / stages, as far as earlier drafts tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cospec.core.submitted_step import SubmittedStep
from cospec.core.types import Draft, ScheduledRequest, SchedulerOutput
from cospec.execution.draft_buffer import DraftRequest
from cospec.execution.draft_dispatcher import DraftDispatcher

OVERLAP = "a window of the same request is in flight"


@dataclass(frozen=True, slots=True)
class _NextWindow:
    """The draft request of a sequence's next window, and the probability that all windows before are accepted."""

    request: DraftRequest
    probability: float


class WindowsInFlight:
    """Implements ``interfaces.WindowsAhead``.

    Attributes:
        least_probability: of a window that is submitted, that all windows before are accepted.
    """

    def __init__(self, dispatcher: DraftDispatcher) -> None:
        self._dispatcher = dispatcher
        self.least_probability = 1 / dispatcher.components.verifier.max_in_flight
        self._next: dict[str, _NextWindow] = {}

    def forget(self, entries: Iterable[ScheduledRequest]) -> None:
        """Forget sequences that are in flight no more; their next window is the first again."""
        for entry in entries:
            self._next.pop(entry.sequence.id, None)

    def follow(
        self, drafts: Mapping[str, Draft], requests: Iterable[DraftRequest], before: Mapping[str, float] = {}
    ) -> None:
        """Note the draft requests that continue submitted windows, as far as the windows are chains.

        Args:
            drafts: of the submitted windows, by id.
            before: probability that all windows before the submitted window are accepted, by id; 1 by default.
        """
        rate = self._dispatcher.rate.value
        for request in requests:
            draft = drafts[request.id]
            if not request.rank and draft.is_chain:
                accepted = rate ** len(draft) if draft.confidence is None else float(draft.confidence.prod())
                self._next[request.id] = _NextWindow(request, before.get(request.id, 1.0) * accepted * rate)

    def lengths(self) -> Mapping[str, int]:
        """See ``WindowsAhead``."""
        pending, ready = self._dispatcher.buffer.pending, self._dispatcher.buffer.ready
        self._next = {
            id: window
            for id, window in self._next.items()
            if pending.get(id) is window.request or ready.get(id, (None,))[0] is window.request
        }
        return {
            id: len(window.request.context.tokens) + 1
            for id, window in self._next.items()
            if window.probability >= self.least_probability
        }

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        """See ``WindowsAhead``."""
        dispatcher, entries, found = self._dispatcher, list[ScheduledRequest](), list[Draft]()
        started = dispatcher.components.clock()
        before = {entry.sequence.id: self._next[entry.sequence.id].probability for entry in plan.entries}
        for entry in plan.entries:
            request = self._next.pop(entry.sequence.id).request
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
        self.follow(drafts, requests, before)
        step = dispatcher.submit(entries, drafts, OVERLAP)
        return step._replace(submission=dispatcher.components.clock() - started)
