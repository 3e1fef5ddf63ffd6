"""The same speculation length for everybody, always."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.plugins import Policy
from cospec.core.stats import StepStats
from cospec.core.tree import MAX_NODES, level_nodes
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.options import Options
from cospec.policies.context import PolicyContext


class FixedOptions(Options):
    """The length is ``num_speculative_tokens``, the shape ``max_nodes`` and ``widths``."""


class Fixed(Policy):
    """Chains of ``length`` tokens, or trees of that depth. Spec section 5, ``fixed``.

    Args:
        max_nodes: of a tree; None is all that ``widths`` make, or a chain.
        widths: children per node at each level, one where there is no number; empty leaves that to the drafter.
    """

    Options: ClassVar[type[FixedOptions]] = FixedOptions
    needs_latency: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    keeps_drafts: ClassVar[bool] = True
    horizon: ClassVar[int] = sys.maxsize

    def __init__(self, length: int, max_nodes: int | None = None, widths: tuple[int, ...] = ()) -> None:
        most = level_nodes(widths, length) if max_nodes is None else max_nodes
        self._budget = DraftBudget(depth=length, max_nodes=min(most, MAX_NODES), widths=widths[:length])

    @classmethod
    def build(cls, options: FixedOptions, setting: PolicyContext) -> Fixed:
        """As long, and as wide, as configured."""
        return cls(setting.length, setting.max_nodes, setting.widths)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """The same budget for everybody."""
        return [self._budget] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """All of every draft."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        """The length."""
        return {"speculation_length": self._budget.depth}
