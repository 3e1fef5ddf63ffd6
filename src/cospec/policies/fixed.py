"""The policies that choose nothing: ``fixed``, one speculation length for all requests, and ``off``, no speculation."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.tree import MAX_NODES, level_nodes
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.plugin_options import Options
from cospec.policies.policy_build_context import PolicyContext


class FixedOptions(Options):
    """No options: ``num_speculative_tokens`` sets the length, ``max_nodes`` and ``widths`` set the shape."""


class Fixed(Policy):
    """Chains of ``length`` tokens, or trees of this depth.

    Args:
        max_nodes: nodes of a tree; None is the full tree of ``widths``, or a chain.
        widths: children per node at each level, 1 beyond the last entry; empty leaves the shape to the drafter.
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
    def build(cls, options: FixedOptions, context: PolicyContext) -> Fixed:
        """Build the policy from the configured length and shape."""
        return cls(context.length, context.max_nodes, context.widths)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Return the same budget for all requests."""
        return [self._budget] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts unchanged."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Do nothing: the policy does not learn."""

    def gauges(self) -> Mapping[str, float]:
        """Return the length."""
        return {"speculation_length": self._budget.depth}


class Off(Fixed):
    """Length 0 for all requests; never calls the drafter."""

    def __init__(self) -> None:
        super().__init__(0)

    @classmethod
    def build(cls, options: FixedOptions, context: PolicyContext) -> Off:
        """Build the policy; the context does not matter."""
        return cls()
