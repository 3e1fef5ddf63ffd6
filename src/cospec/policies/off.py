"""No speculation: the baseline of every other policy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

from cospec.core.plugins import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.options import Options
from cospec.policies.context import PolicyContext


class OffOptions(Options):
    """The policy has no options."""


class Off(Policy):
    """Length 0 for all requests; never calls the drafter."""

    Options: ClassVar[type[OffOptions]] = OffOptions
    needs_latency: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    keeps_drafts: ClassVar[bool] = True
    horizon: ClassVar[int] = sys.maxsize

    def __init__(self) -> None:
        self._budget = DraftBudget()

    @classmethod
    def build(cls, options: OffOptions, context: PolicyContext) -> Off:
        """Build the policy; the context does not matter."""
        return cls()

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Return empty budgets."""
        return [self._budget] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts unchanged."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Do nothing: the policy does not learn."""

    def gauges(self) -> Mapping[str, float]:
        """Return a length of 0."""
        return {"speculation_length": 0}
