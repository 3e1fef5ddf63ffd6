"""One length for all, found by walking downhill on measured time per token (Minions section 3.3).

Every ``decision_threshold`` rounds a line is fitted to time / committed tokens over the window around the latest change
of length. A fall means that the change was good: go on the same way. A rise means that it was not: *reverse direction*.
The paper subtracts after every rise instead, also after one that a subtraction caused, and so runs down to 1 (spec
section 11). Where nothing significant shows, the length stays, and is tried one up or down now and then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from cospec.core.plugins import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.options import Options
from cospec.policies.context import PolicyContext


class SlopeOptions(Options):
    """What may be set.

    Attributes:
        start: the first length; None begins in the middle.
        decision_threshold: rounds between two decisions.
        patience: decisions without a significant slope after which a neighbour is tried.
        significance: how many standard errors a slope has to be from 0.
    """

    start: int | None = Field(default=None, ge=1, le=64)
    decision_threshold: int = Field(default=24, ge=4)
    patience: int = Field(default=4, ge=1)
    significance: float = Field(default=2.0, ge=0, strict=False)


class Slope(Policy):
    """Spec section 5, ``slope``: lengths 1 to ``longest``."""

    Options: ClassVar[type[SlopeOptions]] = SlopeOptions
    needs_latency: ClassVar[bool] = False
    learns: ClassVar[bool] = True

    def __init__(self, options: SlopeOptions, longest: int) -> None:
        self.options, self.longest = options, max(1, longest)
        self.length = min(options.start or (self.longest + 1) // 2, self.longest)
        self._direction = 1
        self._before: list[float] = []  # seconds per token of the rounds at the length before
        self._since: list[float] = []  # and at this one
        self._quiet = 0

    @classmethod
    def build(cls, options: SlopeOptions, setting: PolicyContext) -> Slope:
        """Between 1 and the configured length."""
        return cls(options, setting.longest)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """The present length for everybody."""
        return [DraftBudget(depth=self.length, max_nodes=self.length)] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """All of every draft."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Count rounds that verified drafts of the present length; decide when there are enough."""
        speculated = [commit for commit in commits if commit.drafted]
        tokens = sum(len(commit.path) + 1 for commit in speculated)
        if not tokens or stats.depth != self.length:
            return
        self._since.append(stats.total / tokens * len(speculated))
        if len(self._since) % self.options.decision_threshold == 0:
            self._decide()

    def gauges(self) -> Mapping[str, float]:
        """The length."""
        return {"speculation_length": self.length}

    def _decide(self) -> None:
        slope = trend(self._before[-len(self._since) :], self._since, self.options.significance)
        self._quiet += 1
        if not self._before or (slope == 0 and self._quiet >= self.options.patience):
            self._move(self._direction if not self._before else -self._direction)
        elif slope > 0:
            self._move(-self._direction)
        elif slope < 0:
            self._move(self._direction)

    def _move(self, direction: int) -> None:
        """One step; the other way at the ends."""
        if not 1 <= self.length + direction <= self.longest:
            direction = -direction
        self._direction = direction
        self.length = min(max(1, self.length + direction), self.longest)
        self._before, self._since, self._quiet = self._since, [], 0


def trend(before: Sequence[float], since: Sequence[float], significance: float) -> int:
    """1 where time per token rises significantly over the two stretches of rounds, -1 where it falls, 0 otherwise.

    The line is fitted to blocks of rounds, in each of which the mean time is that of many tokens.
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
