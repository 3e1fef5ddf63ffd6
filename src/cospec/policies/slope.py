"""One length for all requests, found by descent on measured time per token (Minions section 3.3).

Every ``decision_threshold`` steps a line is fitted to time / committed tokens around the latest change of length. A
falling line confirms the change: continue in the same direction. A rising line rejects the change: *reverse direction*.
The paper subtracts after every rise, even after a rise that a subtraction caused, and so ends at length 1. Without a
significant slope the length stays, and a neighbour is tried now and then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.plugin_options import Options
from cospec.policies.policy_build_context import PolicyContext


class SlopeOptions(Options):
    """Options of ``slope``.

    Attributes:
        start: the first length.
        decision_threshold: steps between two decisions.
        patience: decisions without a significant slope after which a neighbour is tried.
        significance: standard errors by which a significant slope differs from 0.
    """

    start: int = Field(default=1, ge=1, le=64)
    decision_threshold: int = Field(default=24, ge=4)
    patience: int = Field(default=4, ge=1)
    significance: float = Field(default=2.0, ge=0, strict=False)


class Slope(Policy):
    """``slope``: lengths 1 to ``longest``."""

    Options: ClassVar[type[SlopeOptions]] = SlopeOptions
    needs_latency: ClassVar[bool] = False
    learns: ClassVar[bool] = True

    def __init__(self, options: SlopeOptions, longest: int) -> None:
        self.options, self.longest = options, max(1, longest)
        self.length = min(options.start, self.longest)
        self._direction = 1
        self._previous: list[float] = []  # seconds per token of the steps at the previous length
        self._current: list[float] = []  # seconds per token of the steps at the current length
        self._insignificant = 0

    @classmethod
    def build(cls, options: SlopeOptions, context: PolicyContext) -> Slope:
        """Build the policy for lengths from 1 to the configured length."""
        return cls(options, context.longest)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Return the current length for all requests."""
        return [DraftBudget(depth=self.length, max_nodes=self.length)] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts unchanged."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Record steps that verified drafts of the current length; decide once there are enough."""
        speculated = [commit for commit in commits if commit.drafted]
        tokens = sum(len(commit.path) + 1 for commit in speculated)
        if not tokens or stats.depth != self.length:
            return
        self._current.append(stats.total / tokens * len(speculated))
        if len(self._current) % self.options.decision_threshold == 0:
            self._decide()

    def gauges(self) -> Mapping[str, float]:
        """Return the current length."""
        return {"speculation_length": self.length}

    def _decide(self) -> None:
        slope = trend(self._previous[-len(self._current) :], self._current, self.options.significance)
        self._insignificant += 1
        if not self._previous or (slope == 0 and self._insignificant >= self.options.patience):
            self._move(self._direction if not self._previous else -self._direction)
        elif slope > 0:
            self._move(-self._direction)
        elif slope < 0:
            self._move(self._direction)

    def _move(self, direction: int) -> None:
        """Change the length by one; reverses at the bounds."""
        if not 1 <= self.length + direction <= self.longest:
            direction = -direction
        self._direction = direction
        self.length = min(max(1, self.length + direction), self.longest)
        self._previous, self._current, self._insignificant = self._current, [], 0


def trend(before: Sequence[float], since: Sequence[float], significance: float) -> int:
    """Return 1 if time per token rises significantly over both stretches of steps, -1 if it falls, else 0.

    The line is fitted to means of blocks of steps, each of which covers many tokens.
    """
    values = np.array([*before, *since])
    size = max(1, len(values) // 16)
    blocks = values[: len(values) // size * size].reshape(-1, size).mean(axis=1)
    if len(blocks) < 4:
        return 0
    x = np.arange(len(blocks)) - (len(blocks) - 1) / 2
    slope = float(x @ blocks / (x @ x))
    residual = blocks - blocks.mean() - slope * x
    error = float(np.sqrt(residual @ residual / (len(blocks) - 2) / (x @ x)))
    return int(np.sign(slope)) if abs(slope) > significance * error else 0
