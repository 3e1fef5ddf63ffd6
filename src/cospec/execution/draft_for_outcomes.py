"""Draft during a verification after each of its outcomes (SSD, 2603.03251)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.interfaces import ModeComponents
from cospec.core.submitted_step import StepResult, SubmittedStep
from cospec.core.types import Commit, Draft, ScheduledRequest
from cospec.execution.draft_buffer import DraftRequest
from cospec.execution.draft_wait import DraftWait, OutcomeNodes
from cospec.execution.overlapped_base import OverlappedMode
from cospec.runtime.executor_base import DRAFT_TIMEOUT


class DraftForOutcomes(OverlappedMode):
    """Drafts and verifies a sequence at the same time::

        target   verify  x a b c             verify  x a B d e
        drafter  draft   x + guesses         draft   d + guesses
                         a + guesses                 e + guesses
                         b + guesses
                         c + guesses

    The drafter branches after each token of the draft: the target may accept any number of these, and writes one token
    of its own after them. The branch of the outcome is the next draft. If no branch has the target's own token, the
    sequence is verified without a draft, or drafted again, whichever commits more tokens per second (``DraftWait``).
    The drafter works on no more branches than the time of a verification allows (``OutcomeNodes``).

    Sequences whose acceptance method is not ``match``, and drafters that cannot draft so
    (``Drafter.drafts_for_outcomes``), draft ahead as in the mode ``draft-ahead``. Their steps wait for missing drafts.

    Attributes:
        wait, nodes: what the mode has learned from the times of steps.
    """

    name: ClassVar[str] = "draft-for-outcomes"

    def __init__(self, components: ModeComponents, timeout: float = DRAFT_TIMEOUT) -> None:
        super().__init__(components, timeout)
        self.wait, self.nodes = DraftWait(), OutcomeNodes()

    def select(self, entries: Sequence[ScheduledRequest]) -> tuple[Sequence[ScheduledRequest], Mapping[str, Draft]]:
        """Return all entries; submits drafts after the outcomes of their verification."""
        dispatcher, clock = self.dispatcher, self.components.clock
        started = clock()
        dispatcher.wait_for_pending(entries)
        pended = clock()
        self.nodes.waited(pended - started)
        missing = [entry for entry in entries if dispatcher.waits_for_draft(entry)]
        if missing and self._waits(entries, missing):
            dispatcher.draft_missing(entries)
            self.wait.waited(clock() - pended)
        drafts = dispatcher.drafts_of(entries)
        if dispatcher.drafts_ahead:
            ahead = [self._request(entry, drafts.get(entry.sequence.id)) for entry in entries]
            dispatcher.submit_drafts([request for request in ahead if request is not None])
        return entries, drafts

    def _waits(self, entries: Sequence[ScheduledRequest], missing: Sequence[ScheduledRequest]) -> bool:
        """Whether to wait for missing drafts."""
        ready = sum([entry.sequence.id in self.dispatcher.buffer.ready for entry in entries])
        return not all(map(self.dispatcher.drafts_for_outcomes, missing)) or self.wait.pays(ready, len(missing))

    def _request(self, entry: ScheduledRequest, draft: Draft | None) -> DraftRequest | None:
        """Return the request for the draft after that of the step; None where there is no such request."""
        if self.dispatcher.drafts_for_outcomes(entry):
            return self.dispatcher.continue_outcomes(entry, draft, self.nodes.count)
        return None if draft is None else self.dispatcher.continue_draft(entry, draft)

    def collect(self, step: SubmittedStep) -> StepResult:
        """See ``OverlappedMode``."""
        result = super().collect(step)
        self.wait.stepped(result.times.target)
        self.nodes.stepped(result.times.target)
        return result

    def commit(self, commits: Sequence[Commit]) -> None:
        """See ``OverlappedMode``."""
        self.wait.committed(commits)
        super().commit(commits)
