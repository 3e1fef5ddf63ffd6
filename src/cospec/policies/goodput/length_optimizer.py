"""Which steps of whose menus to take: the most expected tokens per second of the round.

Tokens cost about the same whoever they are drafted for, and every menu brings less with each step. So for a given depth
the best m tokens are the m best ones, and the sorted list has to be cut once, at the best ratio; every cut of every
depth is looked at, which is exact where costs are equal. No step is sorted before the one that it builds on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftLevels:
    """Of ``n`` sequences, ``J`` each; the arrays are ``[n, J]``, the oldest sequence first.

    Attributes:
        gains: expected tokens.
        sizes: draft tokens.
        depths: of the draft from that step on.
        costs: seconds of drafting, beside the fixed ones of each level.
    """

    gains: Floats
    sizes: Ints
    depths: Ints
    costs: Floats


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the round takes whatever is drafted, in seconds and tokens.

    Attributes:
        tokens: expected without drafts, one for each sequence.
        seconds: without drafts and without what the target takes for its tokens.
        verified: ``[M + 1]``, seconds of the target for its tokens with m draft tokens among them.
        levels: fixed seconds of drafting to depth d, ``[D + 1]``.
        longest: seconds that the round may take (T_max).
        overlap: drafting and verification go on at the same time.
    """

    tokens: float
    seconds: float
    verified: Floats
    levels: Floats
    longest: float = float("inf")
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """``counts [n]``: steps taken per sequence; expected tokens; predicted seconds."""

    counts: Ints
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Expected committed tokens per second."""
        return self.tokens / self.seconds


def allocate(steps: DraftLevels, given: StepLimits) -> LengthChoice:
    """The best counts; at most ``len(given.verified) - 1`` draft tokens in all (Γ_max).

    Where tokens do not cost the same for everybody, the steps are also taken in the order of what they bring alone: in
    front of a cliff of the target's cost, or of Γ_max, room is what is scarce and not time.
    """
    nothing = LengthChoice(np.zeros(len(steps.gains), np.int64), given.tokens, given.seconds + float(given.verified[0]))
    if len(given.verified) < 2:
        return nothing
    worth = _worth(steps, given)
    found = _cut(steps, given, _order(worth, given, nothing.goodput), nothing)
    if np.ptp(steps.costs, axis=0).any():
        gains = np.minimum.accumulate(steps.gains / steps.sizes, axis=1)
        alone = _cut(steps, given, np.argsort(-gains.ravel(), kind="stable"), nothing)
        found = max(found, alone, key=lambda choice: choice.goodput)
    return found


def _cut(steps: DraftLevels, given: StepLimits, order: Ints, nothing: LengthChoice) -> LengthChoice:
    """The best of all beginnings of ``order``, each at the best depth, or ``nothing``."""
    if not len(order):
        return nothing
    n, width = steps.gains.shape
    room = len(given.verified) - 1
    gains, sizes, depths, costs = (
        array.ravel()[order] for array in (steps.gains, steps.sizes, steps.depths, steps.costs)
    )
    deepest = np.arange(1, int(depths.max()) + 1)
    if given.levels[deepest[-1]] == given.levels[1]:
        deepest = deepest[-1:]  # depth costs nothing: one look is enough
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


def _worth(steps: DraftLevels, given: StepLimits) -> Floats:
    """``[n, J]``: what steps bring per second, falling along each menu."""
    slope = float(np.diff(given.verified[:2]).sum())
    gained = np.cumsum(steps.gains, axis=1)
    together = gained / (np.cumsum(steps.costs + steps.sizes * slope, axis=1) + 1e-12)
    worth = steps.gains / (steps.costs + steps.sizes * slope + 1e-12)
    # A draft's first step bears what it takes to begin one, so the first steps are worth what they are together.
    best = together.argmax(axis=1)[:, None]
    worth = np.where(np.arange(worth.shape[1]) <= best, np.take_along_axis(together, best, 1), worth)
    return np.asarray(np.minimum.accumulate(worth, axis=1, out=worth))


def _order(worth: Floats, given: StepLimits, goodput: float) -> Ints:
    """Steps by what they bring per second, the best first, without those that can never pay.

    The best goodput is no less than that without drafts, so a step that brings less per second than that, at the least
    that a token can cost, is in no best choice.
    """
    flat, each = worth.ravel(), np.diff(given.verified)
    floor = goodput if float(each.min()) >= float(each[0]) else 0.0
    candidates = np.flatnonzero(flat > (0.0 if given.overlap else floor))
    return candidates[np.argsort(-flat[candidates], kind="stable")]
