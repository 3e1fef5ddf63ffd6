"""The same speculation length for everybody, always."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cospec.types import Budget, Commit, Draft, Load, RoundStats


class Fixed:
    """Chains of ``length`` tokens. Spec section 5, ``fixed``."""

    def __init__(self, length: int) -> None:
        self._budget = Budget(depth=length, max_nodes=length)

    def plan(self, load: Load) -> list[Budget]:
        """The same budget for everybody."""
        return [self._budget] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """All of every draft."""
        return drafts

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Nothing to learn."""
