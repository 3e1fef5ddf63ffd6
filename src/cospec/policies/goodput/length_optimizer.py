"""Choose draft levels with the most expected tokens per second of the step.

Tokens cost about the same for every sequence, and each further level of a sequence brings less. For a given depth the
best m tokens are therefore the first m of a sorted list. Every cut of the list at every depth is tried, which is exact
for equal costs. No level is sorted before a level that it builds on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TINY = 1e-12  # seconds; a level without cost has a finite value
SAME = 1e-6  # relative difference of equal costs
EXACT = 1e-9  # tokens; a sum of sizes is that close to the whole number that it stands for


@dataclass(frozen=True, slots=True)
class DraftLevels:
    """Levels of ``n`` sequences in each of ``M`` menus; the arrays are ``[M, n, J]``, the oldest sequence first.

    Attributes:
        values: ``[3, M, n, J]``, ``gains``, ``sizes`` and ``costs`` in one array, since each call of numpy takes longer
            than its few sums.
        depths: depth of the draft from this level on.
    """

    values: Floats
    depths: Ints

    @property
    def gains(self) -> Floats:
        """Expected tokens."""
        return np.asarray(self.values[0])

    @property
    def sizes(self) -> Floats:
        """Draft tokens; whole numbers, unless a step verifies one of several groups of sequences."""
        return np.asarray(self.values[1])

    @property
    def costs(self) -> Floats:
        """Seconds of drafting, without the fixed seconds of each level."""
        return np.asarray(self.values[2])

    def menu(self, place: int) -> DraftLevels:
        """The levels of one menu, ``[n, J]``."""
        return DraftLevels(self.values[:, place], self.depths[place])


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


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Costs and limits of the step that do not depend on the choice, in seconds and tokens.

    Attributes:
        tokens: expected tokens without drafts, one per sequence.
        seconds: neither of drafting nor of the target.
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

    def duration(self, verified: float, draft: float, depth: int) -> float:
        """Return the seconds of a step with ``verified`` draft tokens, rounded up, infinite beyond the limits.

        Args:
            draft: seconds of drafting, without the fixed seconds of each level.
            depth: of the deepest draft.
        """
        count = max(0, ceil(verified - EXACT))
        if count >= len(self.verified):
            return float("inf")
        drafting, target = draft + float(self.levels[depth]), float(self.verified[count])
        seconds = self.seconds + (max(drafting, target) if self.overlap else drafting + target)
        return seconds if seconds <= self.longest or not depth else float("inf")

    def undrafted(self, n: int) -> LengthChoice:
        """Return the outcome without drafts for ``n`` sequences."""
        return LengthChoice(np.zeros(n, np.int64), self.tokens, self.seconds + float(self.verified[0]))


def allocate(steps: DraftLevels, given: StepLimits) -> list[LengthChoice]:
    """Return the best counts in each menu, with at most ``len(verified) - 1`` draft tokens in all (Γ_max).

    If a token's cost differs between sequences, the order by gain alone is tried as well. Before a jump of the target's
    cost, or at Γ_max, room is scarce and not time.

    Args:
        given: of all menus.
    """
    menus, n, width = steps.gains.shape
    nothing = given.undrafted(n)
    if len(given.verified) < 2:
        return [nothing] * menus
    slopes = given.verified[1:] - given.verified[:-1]
    first, lowest = float(slopes[0]), float(slopes.min())
    values = _values(steps, first).reshape(menus, n * width)
    if _none_pays(values, first, lowest, given, nothing.goodput):
        return [nothing] * menus
    # The best goodput is at least the goodput without drafts. A level that brings less per second at the lowest cost
    # of a token is in no best choice.
    floor = nothing.goodput if lowest >= first and not given.overlap else 0.0
    counts = (values > floor).sum(axis=1)
    found = _cut(steps, given, (-values).argsort(axis=1, kind="stable"), counts)
    differ = _differ(steps)
    if differ.any():
        gains = _ratios(steps.gains, steps.sizes).reshape(menus, n * width)
        order = (-gains).argsort(axis=1, kind="stable")
        alone = _cut(steps, given, order, differ * (n * width))
        found = [max(both, key=lambda choice: choice.goodput) for both in zip(found, alone, strict=True)]
    return found


def _differ(steps: DraftLevels) -> npt.NDArray[np.bool_]:
    """Return whether the cost of a token at some level differs between sequences, ``[M]``."""
    if steps.gains.shape[1] == 1:
        return np.zeros(len(steps.gains), np.bool_)
    prices = steps.costs / np.maximum(steps.sizes, TINY)
    return np.asarray((abs(prices - prices[:, :1]) > SAME * prices[:, :1]).any(axis=(1, 2)))


def _cut(steps: DraftLevels, given: StepLimits, order: Ints, counts: Ints) -> list[LengthChoice]:
    """Return the best prefix of ``order [M, n · J]`` at the best depth in each menu, no levels if no prefix pays.

    Args:
        counts: ``[M]``, longest prefix.
    """
    menus, n, width = steps.gains.shape
    nothing = given.undrafted(n)
    longest = int(counts.max())
    if not longest:
        return [nothing] * menus
    order = order[:, :longest]
    flat = order + n * width * np.arange(menus)[:, None]
    depths, values = steps.depths.take(flat)[:, None], steps.values.reshape(3, -1)[:, flat][:, :, None]
    listed = np.arange(longest) < counts[:, None, None]
    deepest = (depths * listed).max(axis=2)[:, :, None]
    levels = given.levels[1 : int(deepest.max()) + 1]
    one_pass = bool((levels == levels[0]).all())  # the greatest depth costs no more than the others
    tried = np.arange(len(levels) if one_pass else 1, len(levels) + 1)[:, None]
    taken = depths <= tried  # [menus, depths, levels]
    tokens, verified, draft = (taken * values).cumsum(axis=3)
    tokens += given.tokens
    draft += given.levels[tried]
    verified = np.ceil(verified - EXACT).astype(np.int64)
    target = given.verified.take(verified, mode="clip")
    seconds = (np.maximum(draft, target) if given.overlap else draft + target) + given.seconds
    allowed = listed & (verified < len(given.verified)) & (seconds <= given.longest)
    if not one_pass:
        allowed &= tried <= deepest
    ratio = np.where(allowed, tokens / seconds, 0.0).reshape(menus, -1)
    found = []
    for menu, place in enumerate(ratio.argmax(axis=1).tolist()):
        if ratio[menu, place] > nothing.goodput:
            row, last = divmod(place, longest)
            chosen = order[menu, : last + 1][taken[menu, row, : last + 1]]
            taken_levels = np.bincount(chosen // width, minlength=n)
            found.append(LengthChoice(taken_levels, float(tokens[menu, row, last]), float(seconds[menu, row, last])))
        else:
            found.append(nothing)
    return found


def _values(steps: DraftLevels, slope: float) -> Floats:
    """Return the tokens per second of each level, ``[M, n, J]``, not increasing along a sequence.

    Args:
        slope: the target's seconds per token.
    """
    return _ratios(steps.gains, steps.costs + steps.sizes * slope)


def _ratios(gains: Floats, price: Floats) -> Floats:
    """Return ``gains / price`` of each level, ``[M, n, J]``, not increasing along a sequence."""
    together = gains.cumsum(axis=2) / np.maximum(price.cumsum(axis=2), TINY)
    # The first level carries the start-up cost of a draft, so the first levels are valued together.
    best = together.argmax(axis=2)[:, :, None]
    alone = gains / np.maximum(price, TINY)
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
