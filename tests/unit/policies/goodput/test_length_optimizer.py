"""The fast choice against the exact one, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cospec.policies.goodput.draft_shapes import chains, grid_rows, trees
from cospec.policies.goodput.length_optimizer import (
    DraftLevels,
    LengthChoice,
    StepLimits,
    allocate,
)
from cospec.policies.milp import solve


@dataclass(frozen=True)
class Machine:
    """Seconds: per verified token up to the knee and beyond, per level of drafting."""

    token: float = 1e-4
    level: float = 3e-4
    beyond: float = 3e-4
    knee: int = 6
    context: float = 0.0  # how much dearer each sequence's drafting is than that of the one before
    tree: bool = False
    groups: int = 1  # of the sequences with drafts; a step verifies one group


def problem(rates: list[float], on: Machine = Machine(), **more: Any) -> tuple[DraftLevels, StepLimits]:
    shapes = (trees if on.tree else chains)(4)
    rows = grid_rows(np.array(rates))
    gains, sizes, depths = shapes.gains[rows], shapes.sizes[rows], shapes.depths[rows]
    own = 2e-5 * (1.0 + on.context * np.arange(len(rates)))  # longer texts cost a little more
    n, most = len(rates), int(sizes.sum())
    counts = np.arange(n, n + most + 1)
    verified = on.token * np.minimum(counts, on.knee) + on.beyond * np.maximum(counts - on.knee, 0)
    values = np.array([gains, sizes, sizes * own[:, None]]) / on.groups
    values[:2, :, 0] -= 1.0 - 1.0 / on.groups
    return DraftLevels(values, depths), StepLimits(
        float(n),
        1e-3,
        verified,
        np.arange(int(depths.max()) + 1, dtype=np.float64) * on.level,
        **more,
    )


def best(steps: DraftLevels, given: StepLimits) -> LengthChoice:
    """The choice in the only menu."""
    found, *others = allocate(menus(steps), given)
    assert not others
    return found


def menus(*each: DraftLevels) -> DraftLevels:
    """Menus with as many levels."""
    return DraftLevels(np.stack([one.values for one in each], axis=1), np.stack([one.depths for one in each]))


def brute(steps: DraftLevels, given: StepLimits) -> float:
    """The best goodput over every vector of counts."""
    n, width = steps.gains.shape
    best = 0.0
    for counts in product(range(width + 1), repeat=n):
        taken = np.arange(width) < np.array(counts)[:, None]
        m = max(0, ceil((steps.sizes * taken).sum() - 1e-9))
        if m >= len(given.verified):
            continue
        depth = int((steps.depths * taken).max())
        draft = float((steps.costs * taken).sum()) + (given.levels[depth] if depth else 0.0)
        target = float(given.verified[m])
        seconds = (max(draft, target) if given.overlap else draft + target) + given.seconds
        if seconds <= given.longest or not any(counts):
            best = max(best, (given.tokens + float((steps.gains * taken).sum())) / seconds)
    return best


rates = st.lists(st.floats(0, 1), min_size=1, max_size=4)
groups = st.integers(1, 3)


@settings(max_examples=60)
@given(rates, st.floats(1e-6, 1e-3), st.floats(0, 2e-3), st.floats(1e-6, 1e-3), st.booleans(), groups)
@example([0.875, 1.0], 1e-6, 0.0, 9.5e-4, False, 1)  # a step up after six tokens; one sequence costs more
def test_every_choice_is_within_a_hundredth_of_the_exact_one(
    alphas: list[float], token: float, level: float, beyond: float, overlap: bool, groups: int
) -> None:
    steps, given_ = problem(alphas, Machine(token, level, beyond, context=0.2, groups=groups), overlap=overlap)
    assert best(steps, given_).goodput >= 0.99 * brute(steps, given_)


@settings(max_examples=25)
@given(rates, st.floats(1e-6, 1e-3), st.floats(0, 2e-3), st.floats(1e-6, 1e-3), st.booleans(), groups)
def test_equal_to_the_mixed_integer_form(
    alphas: list[float], token: float, level: float, beyond: float, overlap: bool, groups: int
) -> None:
    steps, given_ = problem(alphas, Machine(token, level, beyond, groups=groups), overlap=overlap)
    exact = solve(steps, given_)
    assert exact.goodput == pytest.approx(brute(steps, given_), rel=5e-3)
    assert best(steps, given_).goodput == pytest.approx(exact.goodput, rel=0.01)


def test_trees_too() -> None:
    for alphas in ([0.3], [0.6, 0.9], [0.2, 0.5, 0.8]):
        steps, given_ = problem(alphas, Machine(token=2e-5, tree=True))
        assert best(steps, given_).goodput == pytest.approx(solve(steps, given_).goodput, rel=0.01)


def counts(choice: LengthChoice) -> list[int]:
    return [int(count) for count in choice.counts]


@settings(max_examples=40)
@given(rates, st.floats(1e-6, 1e-3), st.floats(0, 2e-3), st.floats(1e-6, 1e-3), st.floats(0, 1), st.booleans())
def test_the_choice_in_a_menu_does_not_depend_on_other_menus(
    alphas: list[float], token: float, level: float, beyond: float, context: float, overlap: bool
) -> None:
    """Bit for bit, also where the other menu has more tokens per second, or a deeper level."""
    on = Machine(token, level, beyond, context=context)
    alone = [problem(alphas, replace(on, tree=tree), overlap=overlap) for tree in (False, True)]
    width = max(steps.gains.shape[1] for steps, _ in alone)
    longest = max((given_ for _, given_ in alone), key=lambda given_: len(given_.verified))
    together = allocate(menus(*[padded(steps, width) for steps, _ in alone]), longest)
    for found, (steps, own) in zip(together, alone, strict=True):
        expected = best(steps, replace(longest, verified=longest.verified[: len(own.verified)]))
        assert counts(found) == counts(expected)
        assert (found.tokens, found.seconds) == (expected.tokens, expected.seconds)


def padded(steps: DraftLevels, width: int) -> DraftLevels:
    """With levels that gain nothing."""
    more = ((0, 0), (0, width - steps.gains.shape[1]))
    sizes, costs = np.pad(steps.sizes, more, constant_values=1), np.pad(steps.costs, more, "edge")
    return DraftLevels(np.array([np.pad(steps.gains, more), sizes, costs]), np.pad(steps.depths, more, "edge"))


def test_nothing_pays() -> None:
    steps, given_ = problem([0.9, 0.2], Machine(beyond=5e-3, knee=0))
    assert counts(best(steps, given_)) == [0, 0]
    assert best(steps, given_).goodput == pytest.approx(given_.tokens / (given_.seconds + given_.verified[0]))


def test_verified_tokens_are_bounded_and_the_least_valuable_go_first() -> None:
    steps, given_ = problem([0.9, 0.5, 0.7], Machine(1e-6, 0.0, 1e-6))
    free = best(steps, given_)
    bound = StepLimits(given_.tokens, given_.seconds, given_.verified[:4], given_.levels)
    tight = best(steps, bound)
    assert free.counts.sum() > 3 == tight.counts.sum()
    kept = sorted((steps.gains[i, j] for i in range(3) for j in range(4)), reverse=True)[:3]
    assert tight.tokens == pytest.approx(3 + sum(kept))
    nothing = best(steps, StepLimits(given_.tokens, given_.seconds, given_.verified[:1], given_.levels))
    assert counts(nothing) == [0, 0, 0]


def test_rounds_are_bounded() -> None:
    steps, given_ = problem([0.95, 0.9], Machine(1e-5, beyond=1e-5))
    long = best(steps, given_)
    limit = given_.seconds + given_.verified[0] + 0.5 * (long.seconds - given_.seconds - given_.verified[0])
    short = best(steps, StepLimits(given_.tokens, given_.seconds, given_.verified, given_.levels, limit))
    assert 0 < short.tokens < long.tokens
    assert short.seconds <= limit


def test_the_older_goes_first() -> None:
    steps, given_ = problem([1.0, 1.0], Machine(token=1e-6))
    one = best(steps, StepLimits(given_.tokens, given_.seconds, given_.verified[:3], given_.levels))
    assert counts(one) == [2, 0] or counts(one) == [1, 1]
    assert counts(one)[0] >= counts(one)[1]
