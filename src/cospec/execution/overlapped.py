"""What the rounds that draft beside verification have in common; they differ in whom they verify next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.interfaces import StepContext
from cospec.core.stats import ExecutionInfo, StepTimes
from cospec.core.types import Commit, Draft, ScheduledRequest, SchedulerOutput, StepOutput
from cospec.execution.draft_dispatcher import PATIENCE, DraftDispatcher

OVERLAP = "drafting overlaps verification"


class OverlappedMode(ABC):
    """Takes in what was drafted, chooses whom to verify, has others drafted for meanwhile, verifies."""

    name: ClassVar[str]
    learns: ClassVar[bool] = False

    def __init__(self, components: StepContext, patience: float = PATIENCE) -> None:
        self.components, self.desk = components, DraftDispatcher(components, patience)
        self.times, self.info = StepTimes(), ExecutionInfo(self.name)
        self.readable: Mapping[str, str] = {}

    def run(self, plan: SchedulerOutput) -> list[StepOutput]:
        """Outcomes of the sequences that need no draft or have one."""
        self.desk.open(plan.entries)
        batch, drafts = self.choose(plan.entries)
        outcomes, self.times = self.desk.verify(batch, drafts)
        self.readable = dict.fromkeys([entry.sequence.id for entry in batch], OVERLAP)
        return outcomes

    @abstractmethod
    def choose(self, entries: Sequence[ScheduledRequest]) -> tuple[Sequence[ScheduledRequest], Mapping[str, Draft]]:
        """Whom to verify now, with which drafts; what is to be drafted meanwhile has been asked for by then."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """Target first, then the drafter."""
        self.desk.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Target first, then the drafter."""
        self.desk.free(ids)

    def close(self) -> None:
        """Let the drafter come to rest; nothing it was asked for is used."""
        self.desk.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a sequence is drafted for twice or by nobody."""
        self.desk.check_integrity()
