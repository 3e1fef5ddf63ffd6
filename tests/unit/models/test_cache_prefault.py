"""The memory of KV caches is populated in the background, with its contents."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cospec.models.block_manager import BlockPool
from cospec.models.cache_prefault import CachePrefault
from cospec.models.kv_cache import KVCache, LayerShape

MIB = 1 << 20


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def new_cache() -> KVCache:
    """Keys and values of two layers, 64 MiB."""
    return KVCache([LayerShape(4, 64)] * 2, BlockPool(1024), torch.float32, torch.device("cpu"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux populates memory")
def test_memory_becomes_resident_and_keeps_its_contents() -> None:
    before = resident_bytes()
    cache = new_cache()
    assert sum(size for _, size in cache.memory) == 64 * MIB
    written = cache.layers[1].values[1023]
    written.fill_(2.5)
    assert resident_bytes() - before < 16 * MIB
    assert CachePrefault([cache]).wait(30)
    assert resident_bytes() - before > 60 * MIB
    assert bool((written == 2.5).all())
    assert all(not bool(layer.keys.any()) for layer in cache.layers)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux populates memory")
def test_a_deleted_cache_is_left_out() -> None:
    kept, deleted = new_cache(), new_cache()
    before = resident_bytes()
    caches = [deleted, kept]
    population = CachePrefault(caches)
    caches.clear()
    del deleted
    assert population.wait(30)
    assert 60 * MIB < resident_bytes() - before < 80 * MIB


def test_stop_ends_the_thread() -> None:
    before = resident_bytes() if sys.platform.startswith("linux") else 0
    cache = new_cache()
    population = CachePrefault([cache])
    population.stop()
    assert population.wait(0)
    if before:
        assert resident_bytes() - before < 60 * MIB
