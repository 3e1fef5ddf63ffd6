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

__all__ = ["CachePrefault"]

CHUNK = 2 << 20  # bytes
REST = 4.0  # of the time of a chunk: the thread leaves four fifths of a processor to requests


class CachePrefault:
    """A thread that populates the memory of caches on the CPU; contents stay unchanged.

    The thread ends with the last chunk, on ``stop``, or where the system cannot populate. A deleted cache is left out.
    """

    def __init__(self, caches: Iterable[KVCache]) -> None:
        self._caches = [weakref.ref(cache) for cache in caches if cache.device.type == "cpu"]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cospec-populate", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return whether the thread has ended, after at most ``seconds``."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End the thread after its present chunk."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        for reference in self._caches:
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
                if self._stopped.wait(REST * (time.perf_counter() - started)):
                    return


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
