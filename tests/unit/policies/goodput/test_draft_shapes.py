"""Expected tokens: closed forms against sampling, and menus that bring less with every step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cospec.policies.goodput.draft_shapes import (
    GRID,
    DraftShapes,
    chains,
    grid_rows,
    nodes,
    tree_tokens,
    trees,
)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
def test_expected_tokens_of_a_chain(alpha: float) -> None:
    chance = np.random.default_rng(0)
    kept = (np.cumprod(chance.random((20_000, 5)) < alpha, axis=1)).sum(axis=1) + 1
    assert tree_tokens(alpha, (1,) * 5) == pytest.approx(kept.mean(), abs=0.05)
    assert tree_tokens(1.0, (1,) * 5) == 6
    assert tree_tokens(alpha, ()) == 1


def test_expected_tokens_of_a_tree() -> None:
    """The case in which the paper's formula gives 4.60 of at most 4."""
    assert tree_tokens(0.7, (3, 2, 2)) == pytest.approx(3.66, abs=0.005)
    chance = np.random.default_rng(1)
    reached = np.ones(50_000, bool)
    total = np.ones(50_000)
    for width in (3, 2, 2):
        reached &= (chance.random((50_000, width)) < 0.7).any(axis=1)
        total += reached
    assert tree_tokens(0.7, (3, 2, 2)) == pytest.approx(total.mean(), abs=0.02)
    assert nodes((3, 2, 3)) == 3 + 6 + 18


@pytest.mark.parametrize("make", [chains, trees])
def test_menus_bring_less_with_every_step(make: Callable[[int], DraftShapes]) -> None:
    shapes = make(6)
    assert len(shapes.gains) == len(shapes.budgets) == GRID + 1
    density = shapes.gains / shapes.sizes
    assert (np.diff(density, axis=1) <= 1e-12).all()
    assert (np.diff(shapes.depths, axis=1) >= 0).all()
    for row, budgets in enumerate(shapes.budgets):
        assert budgets[0].depth == budgets[0].max_nodes == 0
        for step, budget in enumerate(budgets[1:], 1):
            assert budget.depth <= shapes.depths[row, step - 1]
            assert budget.max_nodes == shapes.sizes[row, :step].sum()
            widths = budget.widths or (1,) * budget.depth
            assert 1 + shapes.gains[row, :step].sum() == pytest.approx(tree_tokens(row / GRID, widths))
            assert nodes(widths) == budget.max_nodes
    assert max(budget.depth for budget in shapes.budgets[GRID]) == 6


def test_a_tree_is_wide_where_little_is_accepted() -> None:
    shapes = trees(5)
    low, high = shapes.budgets[GRID // 4][2], shapes.budgets[GRID - 2][2]
    assert low.widths[0] > 1
    assert set(high.widths) == {1}
    assert grid_rows(np.array([0.25]))[0] == GRID // 4
