"""Trees as parent lists."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cospec.core.tree import (
    MAX_NODES,
    ancestor_bits,
    children,
    depths,
    is_chain,
    level_nodes,
    path_to,
    sibling_ranks,
)


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, MAX_NODES)))]


@given(parents=parents())
def test_mask_depth_path_and_children_agree(parents: list[int]) -> None:
    bits, depth = ancestor_bits(parents), depths(parents)
    for node, parent in enumerate(parents):
        path = path_to(parents, node)
        assert path[-1] == node
        assert len(path) == depth[node]
        assert {above for above in range(len(parents)) if bits[node] >> above & 1} == set(path)
        assert node in children(parents, parent)
        assert all(above < below for above, below in itertools.pairwise(path))
    assert sorted(child for node in range(-1, len(parents)) for child in children(parents, node)) == list(
        range(len(parents))
    )
    assert is_chain(parents) == (parents == list(range(-1, len(parents) - 1)))
    assert path_to(parents, -1) == []


@pytest.mark.parametrize("wrong", [[0], [-2], [-1, 1], [-1, 5]])
def test_parents_come_first(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="allowed is an earlier node"):
        ancestor_bits(wrong)


def test_a_tree_fits_a_word() -> None:
    assert ancestor_bits(list(range(-1, MAX_NODES - 1)))[-1] == 2**MAX_NODES - 1
    with pytest.raises(ValueError, match="65 nodes"):
        ancestor_bits([-1] * (MAX_NODES + 1))


def test_nodes_of_level_trees() -> None:
    assert level_nodes((3, 2), 4) == 3 + 6 + 6 + 6
    assert level_nodes((), 4) == 4
    assert level_nodes((5, 5, 5), 1) == 5


def test_ranks_among_siblings() -> None:
    tree = (-1, -1, 0, 0, 1, 1, 3)
    assert sibling_ranks(tree, (1, 5)) == (1, 1)
    assert sibling_ranks(tree, (0, 3, 6)) == (0, 1, 0)
    assert sibling_ranks(tree, ()) == ()
    assert sibling_ranks((-1, 0, 1), (0, 1)) == (), "a chain has none"
