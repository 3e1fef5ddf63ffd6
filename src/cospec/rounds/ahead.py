"""Draft further while the draft is being verified, as if all of it were accepted (spec section 6; PipeInfer, DSI)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cospec.protocols import Crew
from cospec.rounds.desk import PATIENCE, Desk
from cospec.stats import RoundInfo, RoundTimes
from cospec.types import Commit, Outcome, Plan


class DraftAhead:
    """A sequence is drafted and verified at once::

        target   verify A0         verify A1         verify A2
        drafter  draft A1 | A0     draft A2 | A0 A1  ...

    When all of a draft was accepted and the next token is the one that the drafter went on with, what it wrote behind
    that is the next draft. Otherwise it is dropped and the sequence drafted anew, for which the others wait: a target
    reads its weights for one sequence as for many, so they would lose more by going on without it.
    """

    def __init__(self, crew: Crew, patience: float = PATIENCE) -> None:
        self.desk = Desk(crew, patience)
        self.times, self.info = RoundTimes(), RoundInfo("draft-ahead")
        self._able = crew.drafter is not None and crew.drafter.drafts_ahead

    def run(self, plan: Plan) -> list[Outcome]:
        """One outcome per entry, in order."""
        desk, entries = self.desk, plan.entries
        desk.open(entries)
        while any(desk.waits_for(entry) for entry in entries):
            desk.ask([desk.fresh(entry) for entry in entries if desk.needs(entry)])
            desk.wait()
            for entry in entries:
                desk.pool.review(entry)
        drafts = desk.drafts_of(entries)
        if self._able:
            chains = [
                (entry, draft) for entry in entries if (draft := drafts.get(entry.sequence.id)) and draft.is_chain
            ]
            desk.ask([ask for entry, draft in chains if (ask := desk.ahead(entry, draft)) is not None])
        outcomes, self.times = desk.verify(entries, drafts)
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
