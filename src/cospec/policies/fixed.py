"""The same speculation length for everybody, always."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cospec.types import Budget, Commit, RoundStats, Sequence


class Fixed:
    """Chains of ``length`` tokens. Spec section 5, ``fixed``."""

    def __init__(self, length: int) -> None:
        self._budget = Budget(depth=length, max_nodes=length)

    def plan(self, sequences: Seq[Sequence]) -> list[Budget]:
        """The same budget for each of ``sequences``."""
        return [self._budget] * len(sequences)

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Nothing to learn."""
