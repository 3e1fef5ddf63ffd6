"""No speculation: the baseline that every other policy is measured against."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cospec.types import Budget, Commit, RoundStats, Sequence


class Off:
    """Length 0 for everybody, whatever ``length`` says; costs no drafter call."""

    def __init__(self, length: int = 0) -> None:
        self._budget = Budget()

    def plan(self, sequences: Seq[Sequence]) -> list[Budget]:
        """An empty budget for each of ``sequences``."""
        return [self._budget] * len(sequences)

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Nothing to learn."""
