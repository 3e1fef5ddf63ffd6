"""The exact mixed-integer form of the choice that ``goodput`` approximates (CoSine equations 5 to 8, corrected).

CoSine minimises T / b + λΓ. Acceptance is absent there, so one token per request is always best. Here the constraints
(memory, step time T_max, verified tokens Γ_max) limit the goodput objective, a ratio. Dinkelbach's iteration turns the
ratio into a sequence of linear problems: maximise tokens - λ · seconds, then set λ to the resulting ratio. CoSine's
b_i, whether request i takes part in a step, is restricted to prefixes of the queue, first come, first served, in turns
(``sequence_selection.py``); without ``choose_batch`` all requests take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.plugin_options import Options
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.goodput.length_optimizer import DraftLevels, LengthChoice, StepLimits
from cospec.policies.policy_build_context import PolicyContext

CLOSE = 1e-9


class MilpOptions(Options):
    """Options of ``milp``.

    Attributes:
        goodput: options of the policy ``goodput``, which gives rates and costs.
        time_limit: seconds of one solution.
    """

    goodput: GoodputOptions = GoodputOptions()
    time_limit: float = Field(default=1.0, gt=0, strict=False)


class Milp(Policy):
    """``milp``: rates, costs, probes and draft caches as in ``goodput``, lengths by HiGHS. Slow."""

    Options: ClassVar[type[MilpOptions]] = MilpOptions
    needs_latency: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    def __init__(self, goodput: Goodput) -> None:
        self._goodput = goodput

    @classmethod
    def build(cls, options: MilpOptions, context: PolicyContext) -> Milp:
        """Build a goodput policy whose lengths the solver chooses."""

        def solve_each(steps: DraftLevels, given: StepLimits) -> list[LengthChoice]:
            return [solve(steps.menu(place), given, options.time_limit) for place in range(len(steps.gains))]

        return cls(Goodput(options.goodput, context, solve_each, every_size=True))

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Return the plan of the goodput policy."""
        return self._goodput.plan(load)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts unchanged."""
        return drafts

    @property
    def horizon(self) -> int:
        """Return the horizon of the goodput policy."""
        return self._goodput.horizon

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Pass the step to the goodput policy."""
        self._goodput.observe(stats, commits)

    def learn(self) -> None:
        """Let the goodput policy learn."""
        self._goodput.learn()

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of the goodput policy."""
        return self._goodput.gauges()


def solve(steps: DraftLevels, given: StepLimits, time_limit: float = 10.0) -> LengthChoice:
    """Return the best counts of levels for costs of any form; the arrays of ``steps`` are ``[n, J]``."""
    idle = given.seconds + float(given.verified[0])
    best = LengthChoice(np.zeros(len(steps.gains), np.int64), given.tokens, idle)
    program = _Program(steps, given)
    while True:
        found = program.best(best.goodput, time_limit)
        if found is None or found.goodput <= best.goodput * (1.0 + CLOSE):
            return best
        best = found


class _Program:
    """Variables: taken levels, depth of the step, number of verified tokens, seconds."""

    def __init__(self, steps: DraftLevels, given: StepLimits) -> None:
        self._steps, self._given = steps, given
        self._n, self._width = steps.gains.shape
        self._levels = int(steps.depths.max())
        self._counts = min(len(given.verified), int(np.ceil(steps.sizes.clip(0.0).sum())) + 1)
        taken = self._n * self._width
        self._level, self._count, self._span = taken, taken + self._levels, taken + self._levels + self._counts
        self._rows = self._constraints()

    def best(self, price: float, time_limit: float) -> LengthChoice | None:
        """Return the choice with the most tokens - price · seconds."""
        size = self._span + 1
        value = np.zeros(size)
        value[: self._level] = -self._steps.gains.ravel()
        value[self._span] = price
        whole = np.ones(size)
        whole[self._span] = 0
        upper = np.ones(size)
        upper[self._span] = min(self._given.longest, 1e9) - self._given.seconds
        done = milp(
            value,
            integrality=whole,
            bounds=Bounds(np.zeros(size), np.maximum(upper, 0.0)),
            constraints=self._rows,
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )
        if done.x is None:
            return None
        taken = np.rint(done.x[: self._level]).reshape(self._n, self._width)
        tokens = self._given.tokens + float((taken * self._steps.gains).sum())
        return LengthChoice(taken.sum(axis=1).astype(np.int64), tokens, self._given.seconds + float(done.x[self._span]))

    def _constraints(self) -> list[LinearConstraint]:
        n, width, given = self._n, self._width, self._given
        taken = n * width
        ordered = lil_matrix((taken, self._span + 1))  # a level needs the level before, and its depth in the step
        below = lil_matrix((taken + self._levels, self._span + 1))
        for i in range(n):
            for j in range(width):
                row = i * width + j
                ordered[row, row] = 1
                if j:
                    ordered[row, row - 1] = -1
                below[row, row] = 1
                below[row, self._level + int(self._steps.depths[i, j]) - 1] = -1
        ordered_most = np.array([1.0 if row % width == 0 else 0.0 for row in range(taken)])
        for level in range(1, self._levels):
            below[taken + level, self._level + level] = 1
            below[taken + level, self._level + level - 1] = -1
        verified = lil_matrix((2, self._span + 1))  # one count of verified tokens, no less than the levels' sizes
        verified[0, self._count : self._span] = 1
        verified[1, :taken] = self._steps.sizes.ravel()
        verified[1, self._count : self._span] = -np.arange(self._counts)
        seconds = lil_matrix((2, self._span + 1))
        draft = np.concatenate([self._steps.costs.ravel(), np.diff(given.levels[: self._levels + 1])])
        target = given.verified[: self._counts]
        for row in range(2):
            if row == 0 or not given.overlap:
                seconds[row, : len(draft)] = draft
            if row == 1 or not given.overlap:
                seconds[row, self._count : self._span] = target
            seconds[row, self._span] = -1
        free = -np.inf
        return [
            LinearConstraint(ordered.tocsr(), free, ordered_most),
            LinearConstraint(below.tocsr(), free, np.zeros(taken + self._levels)),
            LinearConstraint(verified.tocsr(), [1, free], [1, 0]),
            LinearConstraint(seconds.tocsr(), free, [0, 0]),
        ]
