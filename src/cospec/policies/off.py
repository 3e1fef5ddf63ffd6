"""No speculation: the baseline that every other policy is measured against."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import ClassVar

from cospec.options import Options
from cospec.plugins import Policy
from cospec.policies.setting import PolicySetting
from cospec.stats import RoundStats
from cospec.types import Budget, Commit, Draft, Load


class OffOptions(Options):
    """None."""


class Off(Policy):
    """Length 0 for everybody, whatever is configured; costs no drafter call."""

    Options: ClassVar[type[OffOptions]] = OffOptions
    reads_costs: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    keeps_drafts: ClassVar[bool] = True
    lasts: ClassVar[int] = sys.maxsize

    def __init__(self) -> None:
        self._budget = Budget()

    @classmethod
    def build(cls, options: OffOptions, setting: PolicySetting) -> Off:
        """The same everywhere."""
        return cls()

    def plan(self, load: Load) -> list[Budget]:
        """An empty budget for everybody."""
        return [self._budget] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Nothing was drafted."""
        return drafts

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        """A length of 0."""
        return {"speculation_length": 0}
