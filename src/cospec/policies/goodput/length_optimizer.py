"""Choose draft levels with the most expected tokens per second of the step.

Tokens cost about the same for every sequence, and each further level of a sequence brings less. For a given depth the
best m tokens are therefore the first m of a sorted list. Every cut of the list at every depth is tried, which is exact
for equal costs. No level is sorted before a level that it builds on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftLevels:
    """Levels of ``n`` sequences, ``J`` each; the arrays are ``[n, J]``, the oldest sequence first.

    Attributes:
        gains: expected tokens.
        sizes: draft tokens.
        depths: depth of the draft from this level on.
        costs: seconds of drafting, without the fixed seconds of each level.
    """

    gains: Floats
    sizes: Ints
    depths: Ints
    costs: Floats


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Costs and limits of the step that do not depend on the choice, in seconds and tokens.

    Attributes:
        tokens: expected tokens without drafts, one per sequence.
        seconds: without drafts, and without the target's seconds per token.
        verified: ``[M + 1]``, the target's seconds for its tokens including m draft tokens.
        levels: ``[D + 1]``, fixed seconds of drafting to depth d.
        longest: longest step in seconds (T_max).
        overlap: drafting and verification run at the same time.
    """

    tokens: float
    seconds: float
    verified: Floats
    levels: Floats
    longest: float = float("inf")
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """``counts [n]``: levels taken per sequence; expected tokens; predicted seconds."""

    counts: Ints
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Expected committed tokens per second."""
        return self.tokens / self.seconds


def allocate(steps: DraftLevels, given: StepLimits) -> LengthChoice:
    """Return the best counts, with at most ``len(given.verified) - 1`` draft tokens in all (Γ_max).

    If costs differ between sequences, the order by gain alone is tried as well. Before a jump of the target's cost, or
    at Γ_max, room is scarce and not time.
    """
    nothing = LengthChoice(np.zeros(len(steps.gains), np.int64), given.tokens, given.seconds + float(given.verified[0]))
    if len(given.verified) < 2:
        return nothing
    values = _values(steps, given)
    found = _cut(steps, given, _order(values, given, nothing.goodput), nothing)
    if np.ptp(steps.costs, axis=0).any():
        gains = np.minimum.accumulate(steps.gains / steps.sizes, axis=1)
        alone = _cut(steps, given, np.argsort(-gains.ravel(), kind="stable"), nothing)
        found = max(found, alone, key=lambda choice: choice.goodput)
    return found


def _cut(steps: DraftLevels, given: StepLimits, order: Ints, nothing: LengthChoice) -> LengthChoice:
    """Return the best prefix of ``order`` at the best depth, or ``nothing``."""
    if not len(order):
        return nothing
    n, width = steps.gains.shape
    room = len(given.verified) - 1
    gains, sizes, depths, costs = (
        array.ravel()[order] for array in (steps.gains, steps.sizes, steps.depths, steps.costs)
    )
    deepest = np.arange(1, int(depths.max()) + 1)
    if given.levels[deepest[-1]] == given.levels[1]:
        deepest = deepest[-1:]  # depth is free: one candidate is enough
    taken = depths <= deepest[:, None]  # [depths, steps]
    verified = np.cumsum(taken * sizes, axis=1)
    fits = verified <= room
    target = given.verified[np.minimum(verified, room)]
    draft = np.cumsum(taken * costs, axis=1) + given.levels[deepest][:, None]
    seconds = (np.maximum(draft, target) if given.overlap else draft + target) + given.seconds
    tokens = np.cumsum(taken * gains, axis=1) + given.tokens
    ratio = np.where(fits & (seconds <= given.longest), tokens / seconds, 0.0)
    best = int(ratio.argmax())
    if ratio.flat[best] <= nothing.goodput:
        return nothing
    row, last = divmod(best, len(order))
    chosen = order[: last + 1][taken[row, : last + 1]]
    counts = np.bincount(chosen // width, minlength=n)
    return LengthChoice(counts, float(tokens[row, last]), float(seconds[row, last]))


def _values(steps: DraftLevels, given: StepLimits) -> Floats:
    """Return the tokens per second of each level, ``[n, J]``, not increasing along a sequence."""
    slope = float(np.diff(given.verified[:2]).sum())
    gained = np.cumsum(steps.gains, axis=1)
    together = gained / (np.cumsum(steps.costs + steps.sizes * slope, axis=1) + 1e-12)
    values = steps.gains / (steps.costs + steps.sizes * slope + 1e-12)
    # The first level carries the start-up cost of a draft, so the first levels are valued together.
    best = together.argmax(axis=1)[:, None]
    values = np.where(np.arange(values.shape[1]) <= best, np.take_along_axis(together, best, 1), values)
    return np.asarray(np.minimum.accumulate(values, axis=1, out=values))


def _order(values: Floats, given: StepLimits, goodput: float) -> Ints:
    """Return the levels sorted by tokens per second, best first, without levels that cannot pay.

    The best goodput is at least the goodput without drafts. A level that brings less per second at the lowest cost of a
    token is in no best choice.
    """
    flat, each = values.ravel(), np.diff(given.verified)
    floor = goodput if float(each.min()) >= float(each[0]) else 0.0
    candidates = np.flatnonzero(flat > (0.0 if given.overlap else floor))
    return candidates[np.argsort(-flat[candidates], kind="stable")]
