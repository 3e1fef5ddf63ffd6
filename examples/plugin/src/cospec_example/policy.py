"""Drafts of one length at the beginning of an output, and of another length after that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.plugin_options import Options
from cospec.policies.policy_build_context import PolicyContext


class TwoLengthsOptions(Options):
    """Keys of ``policy_options`` for this policy.

    Attributes:
        first: tokens of a draft at the beginning of an output.
        later: tokens of a draft after that; None is ``num_speculative_tokens``.
        after: output tokens at which ``later`` begins.
    """

    first: int = Field(default=2, ge=0, le=64)
    later: int | None = Field(default=None, ge=0, le=64)
    after: int = Field(default=32, ge=0)


class TwoLengths(Policy):
    """Chains whose length depends on the number of output tokens alone."""

    Options: ClassVar[type[TwoLengthsOptions]] = TwoLengthsOptions
    needs_latency: ClassVar[bool] = False  # no time model is needed
    learns: ClassVar[bool] = False  # plans read the length of the output alone
    keeps_drafts: ClassVar[bool] = True  # ``trim`` cuts nothing

    def __init__(self, first: int, later: int, after: int) -> None:
        self._first, self._later, self._after = DraftBudget(first, first), DraftBudget(later, later), after

    @classmethod
    def build(cls, options: TwoLengthsOptions, setting: PolicyContext) -> TwoLengths:
        """With the lengths of the configuration."""
        return cls(options.first, setting.length if options.later is None else options.later, options.after)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """A budget for each sequence, by the length of the output so far."""
        return [self._first if sequence.output_len < self._after else self._later for sequence in load.ready]

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """All of every draft."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def learn(self) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        """The later length."""
        return {"speculation_length": self._later.depth}
