"""Has the system give the memory of KV caches while the engine already runs.

The system gives memory at the first access and clears each page before. Without this module the first requests wait
for the pages that their prompts write. The caches of the engine's own process are populated; caches of drafter
processes and of stages are not.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest

from cospec.models.kv_cache import KVCache
from cospec.native.library import populate

__all__ = ["populate_in_background"]

CHUNK = 2 << 20  # bytes
REST = 4.0  # of the time of a chunk: the thread leaves four fifths of a processor to requests


def populate_in_background(caches: Iterable[KVCache]) -> threading.Thread:
    """Start a thread that populates the memory of ``caches`` on the CPU; contents stay as they are.

    The thread ends with the last chunk, or where the system cannot populate. A cache that is deleted is left out.
    """
    references = [weakref.ref(cache) for cache in caches if cache.device.type == "cpu"]
    thread = threading.Thread(target=_populate, args=(references,), name="cospec-populate", daemon=True)
    thread.start()
    return thread


def _populate(references: list[weakref.ref[KVCache]]) -> None:
    for reference in references:
        cache = reference()
        chunks = [] if cache is None else list(_chunks(cache.memory))
        del cache
        for address, size in chunks:
            cache = reference()  # keeps the memory during the call
            if cache is None:
                break
            started = time.perf_counter()
            if not populate(address, size):
                return
            del cache
            time.sleep(REST * (time.perf_counter() - started))


def _chunks(regions: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Chunks in the order of use: the first of each region, then the second. A pool assigns low pages first."""
    parts = [_split(address, size) for address, size in regions]
    return (chunk for chunk in chain.from_iterable(zip_longest(*parts)) if chunk is not None)


def _split(address: int, size: int) -> Iterator[tuple[int, int]]:
    end = address + size
    while address < end:
        to = min(end, (address // CHUNK + 1) * CHUNK)
        yield address, to - address
        address = to
