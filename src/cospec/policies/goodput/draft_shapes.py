"""Draft shapes of one sequence and their expected tokens, by acceptance rate.

Expected tokens of a chain of k: Σ_{j=0..k} α^j, finite at α = 1 (SmartSpec equation 8). Of a level tree with widths kᵢ:
1 + Σᵢ Π_{j≤i} [1 − (1 − α)^{kⱼ}] (equation 10, corrected: the paper's exceeds the depth). Both bring less with every
further token. Rates by level and width, where measured, replace α and 1 − (1 − α)^{kᵢ}. The shapes of one rate form a
row; each step is at least as good per token as the next. Rates are rounded to 1/``GRID``, so rows are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from cospec.core.types import DraftBudget
from cospec.policies.goodput.level_rates import WIDEST, independent

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GRID = 64
RATES = np.arange(GRID + 1) / GRID
MOST_NODES, DEEPEST = 24, 5  # bounds of trees, with levels of at most ``WIDEST`` siblings


@dataclass(frozen=True)
class DraftShapes:
    """Steps by rate; at most ``J`` steps, shorter rows are padded with steps without gain.

    Attributes:
        gains: ``[GRID + 1, J]``, additional expected tokens of each step.
        sizes: ``[GRID + 1, J]``, additional draft tokens.
        depths: ``[GRID + 1, J]``, depth from this step on.
        budgets: ``[GRID + 1][J + 1]``, the drafter's budget after each number of steps.
    """

    gains: Floats
    sizes: Ints
    depths: Ints
    budgets: tuple[tuple[DraftBudget, ...], ...]

    @cached_property
    def most_tokens(self) -> int:
        """A bound of the draft tokens of one sequence."""
        return int(self.sizes.sum(axis=1).max())

    @cached_property
    def deepest(self) -> int:
        """The greatest depth."""
        return int(self.depths.max())


def grid_rows(rates: Floats) -> Ints:
    """Return the row of each rate, ``[n]``."""
    return np.rint(rates * GRID).astype(np.int64)


def stacked(menus: Sequence[DraftShapes]) -> tuple[Floats, Ints]:
    """Return gains and sizes of all menus, ``[2, M, GRID + 1, J]``, and their depths, ``[M, GRID + 1, J]``.

    Shorter menus end in levels without gain.
    """
    width = max(menu.gains.shape[1] for menu in menus)
    shape = len(menus), GRID + 1, width
    values, depths = np.array([np.zeros(shape), np.ones(shape)]), np.zeros(shape, np.int64)
    for place, menu in enumerate(menus):
        own = menu.gains.shape[1]
        values[0, place, :, :own], values[1, place, :, :own] = menu.gains, menu.sizes
        depths[place, :, :own], depths[place, :, own:] = menu.depths, menu.depths[:, -1:]
    return values, depths


def tree_tokens(alpha: float, widths: Sequence[int]) -> float:
    """Return the expected tokens of a level tree, including the next token of the target; a chain has widths of 1."""
    total, reached = 1.0, 1.0
    for width in widths:
        reached *= 1.0 - (1.0 - alpha) ** width
        total += reached
    return total


def nodes(widths: Sequence[int]) -> int:
    """Return the number of tokens of a full level tree: Σ_h Π_{i≤h} kᵢ."""
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
    return total


def chains(longest: int, acceptance: Floats | None = None) -> DraftShapes:
    """Return chains of up to ``longest`` tokens; ``acceptance``: of levels, as of ``LevelRates.acceptance``."""
    shape = (GRID + 1, longest)
    levels = np.broadcast_to(np.arange(1, longest + 1)[None], shape).copy()
    gains = np.cumprod(_levels_of(longest, acceptance)[:, :, 0], axis=1, dtype=np.float64)
    budgets = tuple(DraftBudget(depth=k, max_nodes=k) for k in range(longest + 1))
    return DraftShapes(gains, np.ones(shape, np.int64), levels, (budgets,) * (GRID + 1))


def trees(longest: int, acceptance: Floats | None = None) -> DraftShapes:
    """Return level trees on the upper hull of expected tokens over nodes; chains are trees of width 1."""
    _, offered = _shapes(longest)
    counts, levels = np.array([budget.max_nodes for budget in offered]), np.array([budget.depth for budget in offered])
    values = _tokens(longest, _levels_of(longest, acceptance))
    rows, lengths = _hulls(values, counts)
    taken = np.arange(max(1, rows.shape[1] - 1)) < lengths[:, None]
    rows = np.pad(rows, ((0, 0), (0, max(0, 2 - rows.shape[1]))))
    gains = np.where(taken, np.diff(np.take_along_axis(values, rows, 1)), 0.0)
    sizes = np.where(taken, np.diff(counts[rows]), 1)
    depths = np.where(taken, np.maximum.accumulate(levels[rows], axis=1)[:, 1:], longest)
    kept = zip(rows.tolist(), lengths.tolist(), strict=True)
    budgets = tuple([tuple(map(offered.__getitem__, row[: length + 1])) for row, length in kept])
    return DraftShapes(gains, sizes, depths, budgets)


def _levels_of(longest: int, acceptance: Floats | None) -> Floats:
    """Return the acceptance of each level at each rate of the grid, ``[GRID + 1, longest, WIDEST]``."""
    if acceptance is None:
        return np.repeat(independent(RATES)[:, None], longest, axis=1)
    return np.asarray(acceptance[:, np.minimum(np.arange(longest), acceptance.shape[1] - 1)])


def _tokens(longest: int, accepted: Floats) -> Floats:
    """Return the expected tokens of each of ``_shapes`` at each rate of the grid, ``[GRID + 1, S]``."""
    widths = _widths(longest)
    levels = accepted[:, np.arange(longest), np.maximum(widths, 1) - 1] * (widths > 0)  # [GRID + 1, S, longest]
    return np.asarray(1.0 + levels.cumprod(axis=2).sum(axis=2))


@lru_cache
def _shapes(longest: int) -> tuple[Sequence[tuple[int, ...]], Sequence[DraftBudget]]:
    """Return all non-increasing sequences of widths within the bounds, chains up to ``longest``, and their budgets."""
    found: list[tuple[int, ...]] = [()]
    for depth in range(1, min(longest, DEEPEST) + 1):
        for each in product(range(1, WIDEST + 1), repeat=depth):
            if all(one >= two for one, two in pairwise(each)) and nodes(each) <= MOST_NODES:
                found.append(each)
    found += [(1,) * k for k in range(DEEPEST + 1, longest + 1)]
    return found, [DraftBudget(len(each), nodes(each), each) for each in found]


@lru_cache
def _widths(longest: int) -> Ints:
    """Return the widths of ``_shapes``, ``[S, longest]``; 0 after the last level."""
    return np.array([each + (0,) * (longest - len(each)) for each in _shapes(longest)[0]])


def _hulls(values: Floats, counts: Ints) -> tuple[Ints, Ints]:
    """Return shapes of each rate, from no draft on, where the next has the steepest gain per node.

    Args:
        values: ``[R, S]``, expected tokens of each shape at each rate.
        counts: ``[S]``, nodes.

    Returns:
        The shapes, ``[R, J + 1]``, where a row repeats its last shape, and the number of steps of each row, ``[R]``.
    """
    rates = np.arange(len(values))
    now, lengths = np.zeros_like(rates), np.zeros_like(rates)
    rows = [now]
    while True:
        more = counts - counts[now][:, None]
        slopes = np.full(values.shape, -np.inf)
        np.divide(values - values[rates, now][:, None], more, out=slopes, where=more > 0)
        best = slopes.argmax(axis=1)
        going = slopes[rates, best] > 1e-9
        if not going.any():
            return np.stack(rows, 1), lengths
        now = np.where(going, best, now)
        lengths += going
        rows.append(now)
