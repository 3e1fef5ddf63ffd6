"""Draft shapes of one sequence and their expected tokens, by acceptance rate.

Expected tokens of a chain of k: Σ_{j=0..k} α^j, finite at α = 1 (SmartSpec equation 8). Of a level tree with widths kᵢ:
1 + Σᵢ Π_{j≤i} [1 − (1 − α)^{kⱼ}] (equation 10, corrected: the paper's exceeds the depth). Both bring less with every
further token. The shapes of one rate form a row; each step is at least as good per token as the next. Rates are rounded
to 1/``GRID``, so that rows are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from cospec.core.types import DraftBudget

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GRID = 64
MOST_NODES, WIDEST, DEEPEST = 24, 4, 5  # bounds of trees


@dataclass(frozen=True, slots=True)
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

    def rows(self, rates: Floats) -> Ints:
        """Return the row of each rate, ``[n]``."""
        return np.rint(rates * GRID).astype(np.int64)


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


def chains(longest: int) -> DraftShapes:
    """Return chains of up to ``longest`` tokens."""
    rates = np.arange(GRID + 1)[:, None] / GRID
    levels = np.arange(1, longest + 1)[None]
    budgets = tuple(DraftBudget(depth=k, max_nodes=k) for k in range(longest + 1))
    shape = (GRID + 1, longest)
    return DraftShapes(
        rates**levels, np.ones(shape, np.int64), np.broadcast_to(levels, shape).copy(), (budgets,) * (GRID + 1)
    )


def trees(longest: int) -> DraftShapes:
    """Return level trees on the upper hull of expected tokens over nodes; chains are trees of width 1."""
    shapes = _shapes(min(longest, DEEPEST))
    shapes += [(1,) * k for k in range(DEEPEST + 1, longest + 1)]
    counts = np.array([nodes(each) for each in shapes])
    rows = [_hull(shapes, counts, rate / GRID) for rate in range(GRID + 1)]
    width = max(max(len(row) - 1 for row in rows), 1)
    gains, sizes = np.zeros((GRID + 1, width)), np.ones((GRID + 1, width), np.int64)
    depths = np.full((GRID + 1, width), longest, np.int64)
    budgets = []
    for rate, row in enumerate(rows):
        values = [tree_tokens(rate / GRID, each) for each in row]
        for step in range(len(row) - 1):
            gains[rate, step] = values[step + 1] - values[step]
            sizes[rate, step] = nodes(row[step + 1]) - nodes(row[step])
            depths[rate, step] = max(len(each) for each in row[: step + 2])
        budgets.append(tuple(DraftBudget(len(each), nodes(each), each) for each in row))
    return DraftShapes(gains, sizes, depths, tuple(budgets))


def _shapes(deepest: int) -> list[tuple[int, ...]]:
    """Return all non-increasing sequences of widths within the bounds."""
    found: list[tuple[int, ...]] = [()]
    for depth in range(1, deepest + 1):
        for each in product(range(1, WIDEST + 1), repeat=depth):
            if all(one >= two for one, two in pairwise(each)) and nodes(each) <= MOST_NODES:
                found.append(each)
    return found


def _hull(shapes: Sequence[tuple[int, ...]], counts: Ints, rate: float) -> list[tuple[int, ...]]:
    """Return shapes from no draft on: each next shape has the steepest gain per node."""
    values = np.array([tree_tokens(rate, each) for each in shapes])
    row, now = [shapes[0]], 0
    while True:
        more = counts - counts[now]
        slopes = np.where(more > 0, (values - values[now]) / np.maximum(more, 1), -np.inf)
        best = int(slopes.argmax())
        if slopes[best] <= 1e-9:
            return row
        row.append(shapes[best])
        now = best
