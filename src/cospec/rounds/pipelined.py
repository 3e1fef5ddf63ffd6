"""Drafters and target at the same time, on different sequences (spec section 6; Minions 3.4, CoSine 4.3)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cospec.protocols import Crew
from cospec.rounds.desk import PATIENCE, Desk
from cospec.stats import RoundInfo, RoundTimes
from cospec.types import Commit, Outcome, Plan, PlanEntry


class Pipelined:
    """While the target verifies one half of the sequences, the other half is drafted for::

        target   verify A      verify B      verify A
        drafter  draft B       draft A       draft B

    The planned sequences are the request pool. A full target batch is half of those that are speculated for; drafters
    pause while so many drafts wait or are being made, and start as soon as the target takes some. Sequences that need
    no draft are verified in every round.
    """

    def __init__(self, crew: Crew, patience: float = PATIENCE) -> None:
        self.desk = Desk(crew, patience)
        self.times, self.info = RoundTimes(), RoundInfo("pipelined")

    def run(self, plan: Plan) -> list[Outcome]:
        """Outcomes of the sequences that need no draft or have one."""
        desk, entries = self.desk, plan.entries
        desk.open(entries)
        full = (sum(entry.budget.depth > 0 for entry in entries) + 1) // 2
        self._draft(entries, full)
        while not (batch := self._batch(entries, full)):
            desk.wait()
        drafts = desk.drafts_of(batch)
        verified = {entry.sequence.id for entry in batch}
        self._draft([entry for entry in entries if entry.sequence.id not in verified], full)
        outcomes, self.times = desk.verify(batch, drafts)
        return outcomes

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

    def _draft(self, entries: Seq[PlanEntry], full: int) -> None:
        """Keep the drafters busy up to a full target batch: back-pressure."""
        desk = self.desk
        drafted = sum(entry.budget.depth > 0 and not desk.needs(entry) for entry in entries)
        if drafted < full:
            desk.ask([desk.fresh(entry) for entry in entries if desk.needs(entry)][: full - drafted])

    def _batch(self, entries: Seq[PlanEntry], full: int) -> list[PlanEntry]:
        """Sequences that need no draft, and the oldest of those that have one."""
        batch = []
        for entry in entries:
            drafted = entry.budget.depth > 0
            if self.desk.waits_for(entry) or (drafted and full == 0):
                continue
            batch.append(entry)
            full -= drafted
        return batch
