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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from cospec.core.submitted_step import FinishedFuture, SubmittedStep
from cospec.core.types import Draft, RequestState, SchedulerOutput
from cospec.execution.draft_buffer import DraftRequest
from cospec.execution.draft_dispatcher import DraftDispatcher

OVERLAP = "a window of the same request is in flight"
WAIT_SLICE = 0.001  # seconds to wait for a draft before the oldest window is looked at


@dataclass(frozen=True, slots=True)
class _Continuation:
    """What continues the latest window of a sequence.

    Attributes:
        request: for the draft after the window; None: there is none.
        windows: for each window up to this one the number of tokens of the sequence if the window is accepted and the
            next token is guessed, and the probability of that; 0 for a tree.
    """

    request: DraftRequest | None
    windows: Sequence[tuple[int, float]]

    def probability(self, sequence: RequestState) -> float:
        """Return the probability that all windows in flight are accepted."""
        return prod([accepted for end, accepted in self.windows if end > len(sequence.tokens)])


class WindowsInFlight:
    """Implements ``interfaces.WindowsAhead``.

    Attributes:
        least_probability: of a window that is submitted, that all windows before are accepted.
    """

    def __init__(self, dispatcher: DraftDispatcher) -> None:
        self._dispatcher = dispatcher
        self.least_probability = 1 / dispatcher.components.verifier.max_in_flight
        self._next: dict[str, _Continuation] = {}
        self._wanted: set[str] = set()  # sequences whose continuation was not submitted to the drafter yet

    def forget(self, ids: Iterable[str]) -> None:
        """Forget sequences; their next window is the first again. Unknown ids are ignored."""
        for id in ids:
            self._next.pop(id, None)
            self._wanted.discard(id)

    def follow(self, draft: Draft, request: DraftRequest | None, before: Sequence[tuple[int, float]] = ()) -> None:
        """Note the request that continues a submitted window; ``draft`` submits this request to the drafter.

        Args:
            draft: of the window.
            before: the windows in flight before, see ``_Continuation``.
        """
        rate = self._dispatcher.rate.value
        accepted = rate ** len(draft) if draft.confidence is None else float(draft.confidence.prod())
        window = draft.base_len + len(draft) + 1, accepted * rate if draft.is_chain else 0.0
        self._next[draft.id] = _Continuation(request, [*before, window])
        self._wanted.add(draft.id)

    def draft(self, sequence: RequestState) -> int | None:
        """See ``WindowsAhead``."""
        id, buffer, following = sequence.id, self._dispatcher.buffer, self._next.get(sequence.id)
        if following is None or following.request is None:
            return None
        first = following.request
        if id in self._wanted:
            self._wanted.remove(id)
            self._dispatcher.submit_drafts([first])
        lost = buffer.pending.get(id) is not first and buffer.ready.get(id, (None,))[0] is not first
        if lost or not 0.0 < following.probability(sequence) >= self.least_probability:
            return None
        return len(first.context.tokens) + 1

    def submit(self, plan: SchedulerOutput, oldest_done: Callable[[], bool]) -> SubmittedStep:
        """See ``WindowsAhead``."""
        dispatcher, [entry] = self._dispatcher, plan.entries
        following = self._next[entry.sequence.id]
        request = following.request
        assert request is not None, "``draft`` has found the request"
        while dispatcher.buffer.pending.get(request.id) is request:
            if oldest_done():
                return SubmittedStep((), FinishedFuture([]))
            dispatcher.wait(WAIT_SLICE)
        del self._next[entry.sequence.id]
        window = dispatcher.buffer.take_window(entry, request)
        if window is None:
            return SubmittedStep((), FinishedFuture([]))
        entry = replace(entry, assumed=window[0])
        drafts = dispatcher.trimmed([window[1]])
        for draft in drafts.values():
            before = [window for window in following.windows if window[0] > len(entry.sequence.tokens)]
            self.follow(draft, dispatcher.continue_draft(entry, draft), before)
        return dispatcher.submit([entry], drafts, OVERLAP)
