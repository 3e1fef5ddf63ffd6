"""Choose draft levels with the most expected tokens per second of the step.

Tokens cost about the same for every sequence, and each further level of a sequence brings less. For a given depth the
best m tokens are therefore the first m of a sorted list. Every cut of the list at every depth is tried, which is exact
for equal costs. No level is sorted before a level that it builds on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TINY = 1e-12  # seconds; a level without cost has a finite value


@dataclass(frozen=True, slots=True)
class DraftLevels:
    """Levels of ``n`` sequences in each of ``M`` menus; the arrays are ``[M, n, J]``, the oldest sequence first.

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

    def menu(self, place: int) -> DraftLevels:
        """The levels of one menu, ``[n, J]``."""
        return DraftLevels(self.gains[place], self.sizes[place], self.depths[place], self.costs[place])


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


def allocate(steps: DraftLevels, limits: Sequence[StepLimits]) -> list[LengthChoice]:
    """Return the best counts in each menu, with at most ``len(verified) - 1`` draft tokens in all (Γ_max).

    If costs differ between sequences, the order by gain alone is tried as well. Before a jump of the target's cost, or
    at Γ_max, room is scarce and not time.

    Args:
        limits: of each menu; the arrays of one menu are the first entries of the arrays of a larger menu.
    """
    menus, n, width = steps.gains.shape
    given, rooms = _largest(limits), [len(each.verified) - 1 for each in limits]
    nothing = _undrafted(given, n)
    if len(given.verified) < 2:
        return [nothing] * menus
    slopes = given.verified[1:] - given.verified[:-1]
    first, lowest = float(slopes[0]), np.array([slopes[:room].min() for room in rooms])
    values = _values(steps, first).reshape(menus, n * width)
    if _none_pays(values, first, float(lowest.min()), given, nothing.goodput):
        return [nothing] * menus
    # The best goodput is at least the goodput without drafts. A level that brings less per second at the lowest cost
    # of a token is in no best choice.
    floors = np.where((lowest >= first) & (not given.overlap), nothing.goodput, 0.0)
    counts = (values > floors[:, None]).sum(axis=1)
    found = _cut(steps, given, rooms, (-values).argsort(axis=1, kind="stable"), counts)
    differ = (steps.costs != steps.costs[:, :1]).any(axis=(1, 2))
    if differ.any():
        gains = np.minimum.accumulate(steps.gains / steps.sizes, axis=2).reshape(menus, n * width)
        order = (-gains).argsort(axis=1, kind="stable")
        alone = _cut(steps, given, rooms, order, differ * (n * width))
        found = [max(both, key=lambda choice: choice.goodput) for both in zip(found, alone, strict=True)]
    return found


def _largest(limits: Sequence[StepLimits]) -> StepLimits:
    """Return the limits of a menu with all draft tokens and levels of all menus."""
    verified, levels = max([each.verified for each in limits], key=len), max([each.levels for each in limits], key=len)
    return replace(limits[0], verified=verified, levels=levels)


def _undrafted(given: StepLimits, n: int) -> LengthChoice:
    return LengthChoice(np.zeros(n, np.int64), given.tokens, given.seconds + float(given.verified[0]))


def _cut(steps: DraftLevels, given: StepLimits, rooms: Sequence[int], order: Ints, counts: Ints) -> list[LengthChoice]:
    """Return the best prefix of ``order [M, n · J]`` at the best depth in each menu, no levels if no prefix pays.

    Args:
        given: of the largest menu.
        rooms: most draft tokens of each menu.
        counts: ``[M]``, longest prefix.
    """
    menus, n, width = steps.gains.shape
    order = order[:, : counts.max()]
    flat = order + n * width * np.arange(menus)[:, None]
    gains, sizes, depths, costs = (
        array.take(flat)[:, None] for array in (steps.gains, steps.sizes, steps.depths, steps.costs)
    )
    present = np.arange(order.shape[1]) < counts[:, None, None]
    deepest = (depths * present).max(axis=(1, 2), initial=0)[:, None]
    tried = np.arange(1, deepest.max() + 1)
    free = given.levels[deepest] == given.levels[1]  # one depth is enough
    allowed = np.where(free, tried == deepest, tried <= deepest)[:, :, None]
    taken = (depths <= tried[:, None]) & present  # [menus, depths, levels]
    verified = (taken * sizes).cumsum(axis=2)
    target = given.verified[np.minimum(verified, len(given.verified) - 1)]
    draft = (taken * costs).cumsum(axis=2) + given.levels[tried][:, None]
    seconds = (np.maximum(draft, target) if given.overlap else draft + target) + given.seconds
    tokens = (taken * gains).cumsum(axis=2) + given.tokens
    allowed = allowed & (verified <= np.array(rooms)[:, None, None]) & (seconds <= given.longest)
    ratio = np.where(allowed, tokens / seconds, 0.0)
    nothing = _undrafted(given, n)
    found = [nothing] * menus
    for menu in counts.nonzero()[0].tolist():
        row, last = divmod(int(ratio[menu].argmax()), order.shape[1])
        if ratio[menu, row, last] > nothing.goodput:
            chosen = order[menu, : last + 1][taken[menu, row, : last + 1]]
            taken_levels = np.bincount(chosen // width, minlength=n)
            found[menu] = LengthChoice(taken_levels, float(tokens[menu, row, last]), float(seconds[menu, row, last]))
    return found


def _values(steps: DraftLevels, slope: float) -> Floats:
    """Return the tokens per second of each level, ``[M, n, J]``, not increasing along a sequence.

    Args:
        slope: the target's seconds per token.
    """
    price = steps.costs + steps.sizes * slope
    together = steps.gains.cumsum(axis=2) / (price.cumsum(axis=2) + TINY)
    # The first level carries the start-up cost of a draft, so the first levels are valued together.
    best = together.argmax(axis=2)[:, :, None]
    alone = steps.gains / (price + TINY)
    values = np.where(np.arange(price.shape[2]) <= best, together.max(axis=2, keepdims=True), alone)
    return np.asarray(np.minimum.accumulate(values, axis=2, out=values))


def _none_pays(values: Floats, first: float, lowest: float, given: StepLimits, goodput: float) -> bool:
    """Return whether no choice reaches more than ``goodput``, that without drafts.

    Levels of one sequence together bring at most their best value, which counts ``first`` seconds per token. At
    ``lowest`` seconds per token the value is at most ``first / lowest`` times as high. Where drafts overlap with
    verification, or a deeper step takes less time, the values are no bound.
    """
    if given.overlap or float(given.levels.min()) < 0.0:
        return False
    return float(values.max()) <= goodput * max(0.0, min(first, lowest)) / (first + TINY)
