"""A step as an optimization problem: draft levels of its sequences, and costs that do not depend on drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cospec.core.types import BatchState, DraftBudget
from cospec.policies.goodput.draft_shapes import DraftShapes
from cospec.policies.goodput.length_optimizer import (
    DraftLevels,
    Floats,
    Ints,
    LengthChoice,
    StepLimits,
    allocate,
)
from cospec.policies.latency.depth_correction import LONGEST
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import StepLatency

Solve = Callable[[DraftLevels, StepLimits], LengthChoice]


@dataclass(frozen=True, slots=True)
class StepBounds:
    """T_max in seconds and Γ_max in draft tokens (CoSine equations 6, 7); None for no bound."""

    seconds: float | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LengthInputs:
    """A step before its lengths are chosen.

    Attributes:
        context: mean tokens per sequence.
        backlog: ``[n]``, seconds of feeding unseen tokens to the drafter, as far as charged to this step; None if there
            are none.
        others: known tokens of other sequences in the step.
        room: draft tokens that fit.
    """

    sequences: int
    context: float
    backlog: Floats | None
    others: int
    room: int


class LengthProblem:
    """Created once per policy; caches a table of the target's seconds per token."""

    def __init__(self, shapes: DraftShapes, cost: StepLatency, bounds: StepBounds, solve: Solve = allocate) -> None:
        self.shapes, self.cost, self.bounds = shapes, cost, bounds
        self._solve = solve
        self._table = np.zeros(0)
        self._of: ForwardLatency | None = None
        self._limits: tuple[LengthInputs, ForwardLatency, StepLimits] | None = None  # the latest, and what they are of

    def inputs(self, load: BatchState, lengths: Sequence[float], backlog: Floats | None) -> LengthInputs:
        """Return the inputs of a step; the room in the cache is M_max."""
        n = len(lengths)
        room = min(load.token_budget, load.free_cache_tokens) - n - load.other_prefill_tokens
        if self.bounds.tokens is not None:
            room = min(room, self.bounds.tokens)
        fed = None if backlog is None or not backlog.any() else self.feeding(backlog)
        return LengthInputs(n, sum(lengths) / n, fed, load.other_prefill_tokens, max(0, room))

    def solve(self, rates: Floats, inputs: LengthInputs, per_sequence: bool) -> tuple[LengthChoice, list[DraftBudget]]:
        """Return the best length of each sequence, or the best common length, from ``rates [n]``."""
        return (self.per_sequence if per_sequence else self.uniform)(rates, inputs)

    def per_sequence(self, rates: Floats, inputs: LengthInputs) -> tuple[LengthChoice, list[DraftBudget]]:
        """Return the best length of each sequence, from ``rates [n]``."""
        rows, given = self.shapes.rows(rates), self.round(inputs)
        choice = self._solve(self.steps(rows, inputs), given)
        undrafted = given.seconds + float(given.verified[0])
        if choice.goodput * undrafted < (1.0 + self.cost.doubt) * given.tokens:
            choice = LengthChoice(np.zeros_like(choice.counts), given.tokens, undrafted)
        budgets = self.shapes.budgets
        return choice, [budgets[row][k] for row, k in zip(rows.tolist(), choice.counts.tolist(), strict=True)]

    def uniform(self, rates: Floats, inputs: LengthInputs) -> tuple[LengthChoice, list[DraftBudget]]:
        """Return the best common length of all sequences."""
        rows = self.shapes.rows(rates)
        steps, given = self.steps(rows, inputs), self.round(inputs)
        n, row = inputs.sequences, int(rows[0])
        verified = np.cumsum(steps.sizes.sum(0))
        count = int(np.searchsorted(verified, len(given.verified) - 1, side="right"))
        count = min(
            count, len(self.shapes.budgets[row]) - 1
        )  # entries beyond the last level are padding, and may look cheap
        tokens = given.tokens + np.concatenate([[0.0], np.cumsum(steps.gains.sum(0))[:count]])
        draft = np.concatenate([[0.0], np.cumsum(steps.costs.sum(0))[:count] + given.levels[steps.depths[0, :count]]])
        target = given.verified[np.concatenate([[0], verified[:count]])]
        seconds = (np.maximum(draft, target) if self.cost.overlap else draft + target) + given.seconds
        ratio = tokens / seconds
        ratio[1:][seconds[1:] > given.longest] = 0.0
        best = int(ratio.argmax())
        if ratio[best] < (1.0 + self.cost.doubt) * ratio[0]:
            best = 0
        choice = LengthChoice(np.full(n, best), float(tokens[best]), float(seconds[best]))
        return choice, [self.shapes.budgets[row][best]] * n

    def steps(self, rows: Ints, inputs: LengthInputs) -> DraftLevels:
        """Return the draft levels of each sequence."""
        gains, sizes = self.shapes.gains[rows], self.shapes.sizes[rows]
        costs = np.asarray(sizes * self.token_cost(inputs), dtype=np.float64)
        if not self.cost.capabilities.costless:
            costs[:, :1] += self.cost.draft.sequence + self.cost.scoring
        if inputs.backlog is not None:
            costs[:, :1] += inputs.backlog[:, None]
        return DraftLevels(gains, sizes, self.shapes.depths[rows], costs)

    def round(self, inputs: LengthInputs) -> StepLimits:
        """Return the step's costs by number of draft tokens, without other sequences' known tokens.

        These tokens are computed in this step or another, regardless of drafts. In the ratio they would make long
        drafts look cheap in expensive steps. The higher price of drafts after these tokens, past a knee, does count.
        """
        if self._limits is None or self._limits[0] is not inputs or self._limits[1] is not self.cost.draft:
            self._limits = inputs, self.cost.draft, self._limits_of(inputs)
        return self._limits[2]

    def _limits_of(self, inputs: LengthInputs) -> StepLimits:
        n, target, capabilities = inputs.sequences, self.cost.target, self.cost.capabilities
        base, most = n + inputs.others, self.shapes.gains.shape[1] * int(self.shapes.sizes.max()) * n
        if self._of is not target or base + most >= len(self._table):
            self._table, self._of = target.table(2 * (base + most)), target
        others = float(self._table[base] - self._table[n])
        verified = self._table[base : base + min(most, inputs.room) + 1] - others
        rest, context = self.cost.rest, target.context * inputs.context * n
        verified = verified + rest.slopes[0] * np.arange(len(verified))
        seconds = target.start + target.fixed + context + target.sequence * n + rest.seconds(0.0, 0.0, n)
        deepest = int(self.shapes.depths.max())
        per_level = 0.0 if capabilities.costless else self.cost.draft.fixed
        levels = np.asarray(np.arange(deepest + 1) * per_level, dtype=np.float64)
        if capabilities.single_pass:
            levels = np.minimum(levels, per_level)
        if not capabilities.costless:
            levels[1:] += self.cost.draft.start
        if not self.cost.overlap:
            excess = self.cost.correction.excess(n)[np.minimum(np.arange(deepest + 1), LONGEST)]
            more = excess * (seconds + float(verified[0]))
            seconds, levels[1:] = seconds + float(more[0]), levels[1:] + more[1:] - more[0]
        limit = float("inf") if self.bounds.seconds is None else self.bounds.seconds - others
        return StepLimits(n, seconds, verified, levels, limit, self.cost.overlap)

    def outcome(self, rates: Floats, counts: Ints, inputs: LengthInputs) -> LengthChoice:
        """Return the expected result of ``counts [n]`` levels instead of the best counts.

        Counts beyond the bounds take infinite time.
        """
        steps, given = self.steps(self.shapes.rows(rates), inputs), self.round(inputs)
        taken = np.arange(steps.gains.shape[1]) < counts[:, None]
        tokens, depth = given.tokens + float(steps.gains[taken].sum()), int(steps.depths[taken].max(initial=0))
        verified, draft = int(steps.sizes[taken].sum()), float(steps.costs[taken].sum() + given.levels[depth])
        target = float(given.verified[verified]) if verified < len(given.verified) else float("inf")
        seconds = given.seconds + (max(draft, target) if given.overlap else draft + target)
        return LengthChoice(counts, tokens, seconds if seconds <= given.longest or not verified else float("inf"))

    def feeding(self, tokens: Floats | Ints) -> Floats:
        """Return the seconds of feeding ``tokens`` of each sequence to the drafter, ``[n]``."""
        each = 0.0 if self.cost.capabilities.costless else self.cost.feeding
        return np.asarray(tokens * each, dtype=np.float64)

    def token_cost(self, inputs: LengthInputs) -> float:
        """Return the seconds of drafting one token, without the fixed seconds of its level."""
        capabilities, draft, n = self.cost.capabilities, self.cost.draft, inputs.sequences
        if capabilities.costless:
            return 0.0
        if capabilities.single_pass:
            return draft.tokens(n) / n
        return draft.context * inputs.context + draft.tokens(n) / n
