"""No speculation: the baseline that every other policy is measured against."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cospec.types import Budget, Commit, Draft, Load, RoundStats


class Off:
    """Length 0 for everybody, whatever ``length`` says; costs no drafter call."""

    def __init__(self, length: int = 0) -> None:
        self._budget = Budget()

    def plan(self, load: Load) -> list[Budget]:
        """An empty budget for everybody."""
        return [self._budget] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Nothing was drafted."""
        return drafts

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Nothing to learn."""
