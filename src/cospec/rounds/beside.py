"""What the rounds that draft beside verification have in common; they differ in whom they verify next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import ClassVar

from cospec.protocols import Crew
from cospec.rounds.desk import PATIENCE, Desk
from cospec.stats import RoundInfo, RoundTimes
from cospec.types import Commit, Draft, Outcome, Plan, PlanEntry


class Beside(ABC):
    """Takes in what was drafted, chooses whom to verify, has others drafted for meanwhile, verifies."""

    name: ClassVar[str]
    learns: ClassVar[bool] = False

    def __init__(self, crew: Crew, patience: float = PATIENCE) -> None:
        self.crew, self.desk = crew, Desk(crew, patience)
        self.times, self.info = RoundTimes(), RoundInfo(self.name)

    def run(self, plan: Plan) -> list[Outcome]:
        """Outcomes of the sequences that need no draft or have one."""
        self.desk.open(plan.entries)
        batch, drafts = self.choose(plan.entries)
        outcomes, self.times = self.desk.verify(batch, drafts)
        return outcomes

    @abstractmethod
    def choose(self, entries: Seq[PlanEntry]) -> tuple[Seq[PlanEntry], Mapping[str, Draft]]:
        """Whom to verify now, with which drafts; what is to be drafted meanwhile has been asked for by then."""

    def commit(self, commits: Seq[Commit]) -> None:
        """Target first, then the drafter."""
        self.desk.commit(commits)

    def free(self, ids: Seq[str]) -> None:
        """Target first, then the drafter."""
        self.desk.free(ids)

    def close(self) -> None:
        """Let the drafter come to rest; nothing it was asked for is used."""
        self.desk.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a sequence is drafted for twice or by nobody."""
        self.desk.check_integrity()
