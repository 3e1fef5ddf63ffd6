"""The layout of packed batches: who attends what, and where rows are written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.tree import path_to
from cospec.errors import InvalidInput
from cospec.models.input_batch import InputBatch, check, pack

CPU = torch.device("cpu")
PAGES = {"a": [3, 1, 4, 15, 9, 2, 6, 5], "b": [0, 7, 8, 10, 11, 12, 13, 14]}


def packed(*slices: SequenceSlice, page_size: int = 4) -> InputBatch:
    return pack(TokenBatch(slices), PAGES, page_size, CPU)


def attended(batch: InputBatch, row: int) -> set[int]:
    """Cache entries that a row attends, as the kernels read the fields."""
    visible, mask = int(batch.visible[row]), int(batch.mask[row]) % 2**64
    return set(range(visible)) | {visible + bit for bit in range(64) if mask >> bit & 1}


@pytest.mark.parametrize("count", [1, 3, 6])
def test_every_column_is_aligned_for_kernels(count: int) -> None:
    """Triton compiles a kernel for 16-byte addresses, and again for others."""
    columns = packed(SequenceSlice("a", 0, tuple(range(1, 1 + count)))).columns
    places = {name: tensor.storage_offset() * tensor.element_size() for name, tensor in columns.tensors.items()}
    assert len(set(places.values())) == len(places) and all(place % 16 == 0 for place in places.values())


def test_known_tokens_are_causal_rows() -> None:
    batch = packed(SequenceSlice("a", 0, (5, 6, 7), logits_from=2), SequenceSlice("b", 9, (8,)))
    assert batch.ids.tolist() == [5, 6, 7, 8]
    assert batch.positions.tolist() == batch.write_at.tolist() == [0, 1, 2, 9]
    assert batch.visible.tolist() == [1, 2, 3, 10]
    assert batch.mask.tolist() == [0, 0, 0, 0]
    assert batch.row_segment.tolist() == [0, 0, 0, 1]
    assert batch.starts.tolist() == [0, 3, 4]
    assert batch.logit_rows.tolist() == [2, 3]
    assert batch.tables.tolist() == [[3, 0, 0], [0, 7, 8]]


def test_dtypes_are_those_the_kernels_read() -> None:
    batch = packed(SequenceSlice("a", 0, (1, 2)))
    wide = {"ids", "positions", "mask", "logit_rows"}
    narrow = {"row_segment", "visible", "tables", "starts", "write_at"}
    assert {name for name in wide if getattr(batch, name).dtype is torch.int64} == wide
    assert {name for name in narrow if getattr(batch, name).dtype is torch.int32} == narrow


def test_chain_is_laid_out_like_known_tokens() -> None:
    plain = packed(SequenceSlice("a", 4, (1, 2, 3, 4)))
    chain = packed(SequenceSlice("a", 4, (1, 2, 3, 4), parents=(-1, 0, 1)))
    for name in ("positions", "visible", "mask", "write_at"):
        assert torch.equal(getattr(plain, name), getattr(chain, name))


def test_tree_without_known_tokens() -> None:
    batch = packed(SequenceSlice("a", 5, (1, 2), parents=(-1, -1)))
    assert batch.positions.tolist() == [5, 5]
    assert batch.write_at.tolist() == [5, 6]
    assert [attended(batch, row) for row in (0, 1)] == [{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 6}]


@settings(max_examples=60)
@given(data=st.data(), start=st.integers(0, 40), known=st.integers(0, 5), nodes=st.integers(1, 64))
def test_tree_nodes_attend_prefix_and_ancestors(data: st.DataObject, start: int, known: int, nodes: int) -> None:
    parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(nodes))
    part = SequenceSlice("a", start, tuple(range(known + nodes)), parents=parents)
    batch = packed(SequenceSlice("b", 0, (1, 2)), part, page_size=16)
    base = start + known
    for row in range(known):
        assert attended(batch, 2 + row) == set(range(start + row + 1))
    for node in range(nodes):
        path = path_to(parents, node)
        row = 2 + known + node
        assert attended(batch, row) == set(range(base)) | {base + step for step in path}
        assert int(batch.positions[row]) == base - 1 + len(path)
        assert int(batch.write_at[row]) == base + node


def test_missing_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 9 pages and has 8"):
        packed(SequenceSlice("a", 32, (1,)))


def test_too_large_trees_are_refused() -> None:
    with pytest.raises(ValueError, match="65 nodes"):
        packed(SequenceSlice("a", 0, (0,) * 65, parents=(-1,) * 65), page_size=16)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (SequenceSlice("a", 0, (1, 100)), "token id is 100"),
        (SequenceSlice("a", 0, (-1, 5)), "token id is -1"),
        (SequenceSlice("a", 7, (1, 2)), "sequence length is 9"),
        (SequenceSlice("a", 6, (1, 2, 3), parents=(-1, 0)), "sequence length is 9"),
    ],
)
def test_check_refuses_what_the_model_does_not_take(part: SequenceSlice, words: str) -> None:
    with pytest.raises(InvalidInput, match=words.replace(".", r"\.")):
        check(TokenBatch((part,)), vocab_size=100, max_len=8)


def test_check_counts_tree_nodes_by_depth() -> None:
    check(TokenBatch((SequenceSlice("a", 6, (1, 2, 3, 4), parents=(-1, -1, -1)),)), vocab_size=100, max_len=8)


@pytest.mark.parametrize(
    "slices",
    [
        (),
        (SequenceSlice("a", 0, ()),),
        (SequenceSlice("a", 0, (1,), logits_from=2),),
        (SequenceSlice("a", 0, (1,), (-1, 0)),),
    ],
)
def test_check_refuses_inconsistent_batches(slices: tuple[SequenceSlice, ...]) -> None:
    with pytest.raises(ValueError):
        check(TokenBatch(slices), vocab_size=100, max_len=8)
