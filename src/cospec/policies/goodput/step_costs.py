"""The costs of a step by its draft tokens; the problems of all menus of draft shapes share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cospec.core.types import BatchState
from cospec.policies.goodput.length_optimizer import Floats, Ints, StepLimits
from cospec.policies.latency.depth_correction import LONGEST
from cospec.policies.latency.step import StepLatency

KEPT = 16  # steps whose costs are kept: of one decision, with several numbers of sequences or drafters


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
        groups: parts of the sequences with drafts, of which a step verifies one. The others are charged their cached
            tokens and the target's seconds per sequence all the same, so drafts look a little dearer than they are.
    """

    sequences: int
    context: float
    backlog: Floats | None
    others: int
    room: int
    groups: int = 1


class StepCosts:
    """Prices steps, and keeps the costs of the latest steps."""

    def __init__(self, latency: StepLatency, bounds: StepBounds = StepBounds()) -> None:
        self.latency, self.bounds = latency, bounds
        self._known: dict[tuple[float, ...], StepLimits] = {}  # by all that the costs of a step depend on

    def inputs(
        self, load: BatchState, lengths: Sequence[float], backlog: Floats | None, groups: int = 1
    ) -> LengthInputs:
        """Return the inputs of a step; the room in the cache is M_max. One sequence is no more than one group."""
        n, groups = len(lengths), min(len(lengths), groups)
        planned = min(load.token_budget, load.free_cache_tokens) - n - load.other_prefill_tokens  # in all groups
        room = (planned - (groups - 1) * n) // groups
        if self.bounds.tokens is not None:
            room = min(room, self.bounds.tokens)
        fed = None if backlog is None else self.feeding(backlog)
        return LengthInputs(n, sum(lengths) / n, fed, load.other_prefill_tokens, max(0, room), groups)

    def limits(self, inputs: LengthInputs, most_tokens: int, deepest: int) -> StepLimits:
        """Return the step's costs by number of draft tokens, without other sequences' known tokens.

        These tokens are computed in this step or another, regardless of drafts. In the ratio they would make long
        drafts look cheap in expensive steps. The higher price of drafts after these tokens, past a knee, does count.

        Args:
            most_tokens, deepest: draft tokens of one sequence and deepest level that any menu offers.
        """
        latency = self.latency
        step = inputs.sequences, inputs.context, inputs.others, inputs.room
        overlaps = latency.overlaps(alone=inputs.sequences == 1 and not inputs.others)
        key = *step, latency.drafters, latency.learned, overlaps, most_tokens, deepest
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = self._limits_of(inputs, overlaps, most_tokens, deepest)
        return self._known[key]

    def _limits_of(self, inputs: LengthInputs, overlaps: bool, most_tokens: int, deepest: int) -> StepLimits:
        latency, n = self.latency, inputs.sequences
        target, rest, capabilities = latency.target, latency.rest, latency.capabilities
        tokens = np.arange(min(most_tokens * n, inputs.room) + 1.0)
        verified = target.tokens_of_all(tokens + (n + inputs.others))
        others = float(verified[0]) - target.tokens(n)
        context = target.context * inputs.context * n
        verified += target.start + target.fixed + context + target.sequence * n - others
        verified += rest.slopes[0] * tokens
        seconds = rest.seconds(0.0, 0.0, n)
        depths = np.arange(deepest + 1)
        per_level = 0.0 if capabilities.costless else latency.draft.fixed
        levels = np.asarray(per_level * (np.minimum(depths, 1) if capabilities.single_pass else depths), np.float64)
        if not capabilities.costless:
            levels[1:] += latency.draft.start
        if not overlaps:
            excess = latency.correction.excess(n)[np.minimum(depths, LONGEST)]
            more = excess * (seconds + float(verified[0]))
            seconds, levels[1:] = seconds + float(more[0]), levels[1:] + more[1:] - more[0]
        limit = float("inf") if self.bounds.seconds is None else self.bounds.seconds - others
        return StepLimits(n, seconds, verified, levels, limit, overlaps)

    def feeding(self, tokens: Floats | Ints) -> Floats:
        """Return the seconds of feeding ``tokens`` of each sequence to the drafter, ``[n]``."""
        each = 0.0 if self.latency.capabilities.costless else self.latency.feeding
        return np.asarray(tokens * each, dtype=np.float64)

    def token_cost(self, inputs: LengthInputs) -> float:
        """Return the seconds of drafting one token, without the fixed seconds of its level."""
        capabilities, draft, n = self.latency.capabilities, self.latency.draft, inputs.sequences
        if capabilities.costless:
            return 0.0
        if capabilities.single_pass:
            return draft.tokens(n) / n
        return draft.context * inputs.context + draft.tokens(n) / n

    @property
    def draft_cost(self) -> float:
        """Seconds of a draft besides its tokens, its levels, and the feeding of unseen tokens."""
        return 0.0 if self.latency.capabilities.costless else self.latency.draft.sequence + self.latency.scoring
