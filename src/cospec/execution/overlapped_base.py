"""Common base of the execution modes that draft during verification."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.interfaces import ModeComponents, WindowsAhead
from cospec.core.stats import ExecutionInfo
from cospec.core.submitted_step import StepResult, SubmittedStep
from cospec.core.types import Commit, Draft, ScheduledRequest, SchedulerOutput
from cospec.execution.draft_dispatcher import DraftDispatcher
from cospec.runtime.executor_base import DRAFT_TIMEOUT

OVERLAP = "drafting overlaps verification"


class OverlappedMode(ABC):
    """Collects drafts, selects sequences to verify, submits further drafts, submits to the verifier.

    A subclass decides which sequences to verify next.
    """

    name: ClassVar[str]
    learns: ClassVar[bool] = False
    windows_ahead: WindowsAhead | None = None

    def __init__(self, components: ModeComponents, timeout: float = DRAFT_TIMEOUT) -> None:
        self.components, self.dispatcher = components, DraftDispatcher(components, timeout)
        self.info = ExecutionInfo(self.name, drafts_ahead=self.dispatcher.buffer.used, groups=self.groups)

    @property
    def groups(self) -> int:
        """Parts of the sequences with drafts, of which a step verifies one."""
        return 1

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        """Submit the sequences that need no draft or have one."""
        self.dispatcher.open(plan.entries)
        batch, drafts = self.select(plan.entries)
        return self.dispatcher.submit(batch, drafts, OVERLAP)

    def collect(self, step: SubmittedStep) -> StepResult:
        """Wait for a submitted step."""
        return step.collect(self.components.clock)

    @abstractmethod
    def select(self, entries: Sequence[ScheduledRequest]) -> tuple[Sequence[ScheduledRequest], Mapping[str, Draft]]:
        """Return the entries to verify now, with their drafts; submits the drafts to make during verification."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """Commit in the target first, then in the drafter."""
        self.dispatcher.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences in the target first, then in the drafter. Unknown ids are ignored."""
        self.dispatcher.free(ids)

    def close(self) -> None:
        """Let the drafter finish pending calls; discards their results."""
        self.dispatcher.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if a sequence has two drafts, or a pending draft that no drafter makes."""
        self.dispatcher.check_integrity()
