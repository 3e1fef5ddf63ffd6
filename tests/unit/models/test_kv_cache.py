"""The KV cache's tensors: committing paths, moving entries, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cospec.core.types import Commit
from cospec.models.block_manager import BlockPool
from cospec.models.kv_cache import KVCache, LayerShape, block_bytes
from cospec.models.kv_cache_formats import CACHE_DTYPES

SHAPES = (LayerShape(2, 3), LayerShape(1, 5))


class Operations(TorchDispatchMode):
    """Counts the tensor operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def cache_with(by_head: bool, length: int = 14, dtype: torch.dtype = torch.float32) -> KVCache:
    """Sequence ``a`` between pages of another; entry ``i`` of every layer, head and dimension holds ``i``."""
    cache = KVCache(SHAPES, BlockPool(16, 4), dtype, torch.device("cpu"), by_head)
    for part in (4, 8, length):
        cache.pages.allocate("other", part)
        cache.pages.allocate("a", part)
    table = cache.pages.table("a")
    for layer in cache.layers:
        for entries in (layer.keys, layer.values):
            for index in range(length):
                entries[table[index // 4], :, index % 4] = float(index)
    return cache


def entries_of(cache: KVCache, length: int = 14) -> list[float]:
    """What the entries of ``a`` hold, equal over layers, heads and dimensions."""
    table = cache.pages.table("a")
    result = []
    for index in range(length):
        found = {
            float(value)
            for layer in cache.layers
            for entries in (layer.keys, layer.values)
            for value in entries[table[index // 4], :, index % 4].flatten()
        }
        assert len(found) == 1
        result.append(found.pop())
    return result


@pytest.mark.parametrize("by_head", [False, True])
def test_shapes(by_head: bool) -> None:
    cache = cache_with(by_head)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(16, 2, 4, 3), (16, 1, 4, 5)]
    assert cache.layers[0].keys.is_contiguous() is not by_head


@pytest.mark.parametrize("dtype", CACHE_DTYPES.values(), ids=str)
@pytest.mark.parametrize("by_head", [False, True])
def test_commit_moves_a_path_together(by_head: bool, dtype: torch.dtype) -> None:
    cache = cache_with(by_head, dtype=dtype)
    cache.commit([Commit("a", base_len=6, tokens=(1, 2, 3, 4), path=(0, 3, 4), computed=9)])
    assert entries_of(cache) == [0, 1, 2, 3, 4, 5, 6, 9, 10, 9, 10, 11, 12, 13]


def test_moves_read_before_they_write() -> None:
    cache = cache_with(False)
    cache.move(cache.pages.table("a"), [3, 4, 5], [2, 3, 4])
    assert entries_of(cache)[:7] == [0, 1, 3, 4, 5, 5, 6]


def test_prefixes_are_left_in_place() -> None:
    cache = cache_with(False)
    with Operations() as operations:
        cache.commit([Commit("a", 6, (1, 2, 3), (0, 1), 8), Commit("other", 6, (1,), (), 6)])
    assert operations.count == 0
    with operations:
        cache.commit([Commit("a", 6, (1, 2, 3), (0, 2), 8)])
    assert operations.count > 0


def test_commit_of_a_freed_sequence_is_ignored() -> None:
    cache = cache_with(False)
    cache.free(["a", "never seen"])
    cache.commit([Commit("a", 6, (1, 2), (2,), 7)])
    assert all(float(layer.keys.max()) == 13 for layer in cache.layers)


@pytest.mark.parametrize("dtype", CACHE_DTYPES.values(), ids=str)
def test_page_bytes_counts_keys_and_values_of_all_layers(dtype: torch.dtype) -> None:
    cache = cache_with(False, dtype=dtype)
    held = sum(entries.nbytes for layer in cache.layers for entries in (layer.keys, layer.values))
    assert block_bytes(SHAPES, 4, dtype) * 16 == held
