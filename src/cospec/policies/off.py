"""No speculation: the baseline that every other policy is measured against."""

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
    """None."""


class Off(Policy):
    """Length 0 for everybody, whatever is configured; costs no drafter call."""

    Options: ClassVar[type[OffOptions]] = OffOptions
    needs_latency: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    keeps_drafts: ClassVar[bool] = True
    horizon: ClassVar[int] = sys.maxsize

    def __init__(self) -> None:
        self._budget = DraftBudget()

    @classmethod
    def build(cls, options: OffOptions, setting: PolicyContext) -> Off:
        """The same everywhere."""
        return cls()

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """An empty budget for everybody."""
        return [self._budget] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Nothing was drafted."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        """A length of 0."""
        return {"speculation_length": 0}
