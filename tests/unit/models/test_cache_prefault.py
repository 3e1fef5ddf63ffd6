"""The memory of KV caches is populated in the background, with its contents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest
import torch

from cospec.models.block_manager import BlockPool
from cospec.models.cache_prefault import CachePrefault
from cospec.models.kv_cache import KVCache, LayerShape

MIB = 1 << 20
PROGRAM = """
import torch
from cospec.models.block_manager import BlockPool
from cospec.models.cache_prefault import CachePrefault
from cospec.models.kv_cache import KVCache, LayerShape
cache = KVCache([LayerShape(8, 64)] * 8, BlockPool(2048), torch.float32, torch.device("cpu"))
population = CachePrefault([cache], lambda: False)
"""  # 1 GiB, which takes longer than the end of the program


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
    assert CachePrefault([cache], lambda: False).wait(30)
    assert resident_bytes() - before > 60 * MIB
    assert bool((written == 2.5).all())
    assert all(not bool(layer.keys.any()) for layer in cache.layers)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux populates memory")
def test_a_deleted_cache_is_left_out() -> None:
    kept, deleted = new_cache(), new_cache()
    before = resident_bytes()
    caches = [deleted, kept]
    population = CachePrefault(caches, lambda: False)
    caches.clear()
    del deleted
    assert population.wait(30)
    assert 60 * MIB < resident_bytes() - before < 80 * MIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux populates memory")
def test_nothing_is_populated_while_the_engine_has_requests() -> None:
    requests, looked = ["one"], Event()

    def busy() -> bool:
        looked.set()
        return bool(requests)

    before = resident_bytes()
    cache = new_cache()
    population = CachePrefault([cache], busy)
    assert looked.wait(30)
    assert not population.wait(0.2)
    assert resident_bytes() - before < 16 * MIB
    requests.clear()
    assert population.wait(30)
    assert resident_bytes() - before > 60 * MIB
    del cache


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux populates memory")
def test_nothing_is_populated_while_another_engine_has_requests() -> None:
    cache = new_cache()
    other = CachePrefault([], lambda: True)
    population = CachePrefault([cache], lambda: False)
    assert not population.wait(0.2)
    other.stop()
    assert population.wait(30)


def test_stop_ends_a_thread_that_waits_for_requests() -> None:
    cache = new_cache()
    population = CachePrefault([cache], lambda: True)
    assert not population.wait(0)
    population.stop()
    assert population.wait(0)
    del cache


def test_a_program_ends_while_memory_is_populated() -> None:
    """The thread would be cancelled in code of C++, which aborts the process."""
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", PROGRAM]).returncode == 0
