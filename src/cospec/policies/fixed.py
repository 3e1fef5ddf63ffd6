"""The same speculation length for everybody, always."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import ClassVar

from cospec.options import Options
from cospec.policies.setting import PolicySetting
from cospec.types import Budget, Commit, Draft, Load, RoundStats


class FixedOptions(Options):
    """The length is ``num_speculative_tokens``."""


class Fixed:
    """Chains of ``length`` tokens. Spec section 5, ``fixed``."""

    Options: ClassVar[type[FixedOptions]] = FixedOptions

    def __init__(self, length: int) -> None:
        self._budget = Budget(depth=length, max_nodes=length)

    @classmethod
    def build(cls, options: FixedOptions, setting: PolicySetting) -> Fixed:
        """As long as configured."""
        return cls(setting.length)

    def plan(self, load: Load) -> list[Budget]:
        """The same budget for everybody."""
        return [self._budget] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """All of every draft."""
        return drafts

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        """The length."""
        return {"speculation_length": self._budget.depth}
