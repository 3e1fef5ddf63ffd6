"""Each rule by itself on random tables: exact for every pair of distributions, with zeros and equal rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cospec.registry import ACCEPTANCE_METHODS
from harness.enumerated_draws import total_variation
from harness.tables import Tables

EXACT = 1e-12
CHAIN_RULES = ["rejection", "block", "recursive"]


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    """Small weights, so that zeros, equal rows and q = p turn up often."""
    vocab, depth = draw(st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)]))
    scale = draw(st.sampled_from([1, 3, 1000]))

    def row() -> np.ndarray:
        weights = draw(st.lists(st.integers(0, scale), min_size=vocab, max_size=vocab).filter(any))
        return np.array(weights, dtype=float) / sum(weights)

    prefixes = [words for n in range(depth + 1) for words in itertools.product(range(vocab), repeat=n)]
    p = {prefix: row() for prefix in prefixes}
    q = {prefix: p[prefix] if draw(st.booleans()) and draw(st.booleans()) else row() for prefix in prefixes}
    return Tables(depth, p, q)


@pytest.mark.parametrize("name", CHAIN_RULES)
@settings(max_examples=70, derandomize=True)
@given(tables=tables())
def test_a_sampled_chain_keeps_the_distribution(name: str, tables: Tables) -> None:
    assert total_variation(tables.probs(ACCEPTANCE_METHODS.load(name)()), tables.wanted()) < EXACT


@pytest.mark.parametrize("name", ["match", *CHAIN_RULES])
@settings(max_examples=25, derandomize=True)
@given(tables=tables())
def test_any_chosen_chain_keeps_the_distribution(name: str, tables: Tables) -> None:
    vocab = len(tables.p[()])
    for point in itertools.product(range(vocab), repeat=tables.depth):
        assert total_variation(tables.probs(ACCEPTANCE_METHODS.load(name)(), point), tables.wanted()) < EXACT, point


@settings(max_examples=70, derandomize=True)
@given(tables=tables())
def test_block_keeps_at_least_as_much_as_rejection(tables: Tables) -> None:
    block, rejection = (tables.accepted(ACCEPTANCE_METHODS.load(name)()) for name in ("block", "rejection"))
    assert block >= rejection - EXACT


def test_block_keeps_more_where_it_can() -> None:
    """The example of the paper's introduction: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 and 11/9."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    prefixes = [words for n in range(3) for words in itertools.product(range(2), repeat=n)]
    example = Tables(2, dict.fromkeys(prefixes, p), dict.fromkeys(prefixes, q))
    assert example.accepted(ACCEPTANCE_METHODS.load("rejection")()) == pytest.approx(10 / 9)
    assert example.accepted(ACCEPTANCE_METHODS.load("block")()) == pytest.approx(11 / 9)


@pytest.mark.parametrize("name", CHAIN_RULES)
@settings(max_examples=30, derandomize=True)
@given(tables=tables())
def test_the_target_as_its_own_drafter_is_always_accepted(name: str, tables: Tables) -> None:
    own = Tables(tables.depth, tables.p, tables.p)
    assert own.accepted(ACCEPTANCE_METHODS.load(name)()) == pytest.approx(own.depth)
