"""Has the system give the memory of KV caches while no engine of the process has a request.

The system gives memory at the first access and clears each page before. Without this module a prompt waits for every
page that it writes first. Clearing pages while requests run would slow down their forwards, so the thread waits until
the requests have ended. The caches of the engine's own process are populated; caches of drafter processes and of stages
are not.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, zip_longest
from typing import ClassVar

from cospec.models.kv_cache import KVCache
from cospec.native.library import populate

__all__ = ["CachePrefault"]

CHUNK = 2 << 20  # bytes
PAUSE = 0.05  # seconds between two checks whether requests have ended


class CachePrefault:
    """A thread that populates the memory of caches on the CPU; contents stay unchanged.

    The thread ends with the last chunk, on ``stop``, or where the system cannot populate. A deleted cache is left out.

    Args:
        caches: the caches, of any device.
        busy: says whether the engine has requests. No thread of the process populates anything then.
    """

    _all: ClassVar[list[weakref.ref[CachePrefault]]] = []  # of the process

    def __init__(self, caches: Iterable[KVCache], busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._caches = [weakref.ref(cache) for cache in caches if cache.device.type == "cpu"]
        self._stopped = threading.Event()
        self._all.append(weakref.ref(self, self._all.remove))
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

    @classmethod
    def stop_all(cls) -> None:
        """End all threads of the process.

        A thread that runs while the interpreter ends would be cancelled inside a destructor of C++, which aborts the
        process.
        """
        for each in [reference() for reference in tuple(cls._all)]:
            if each is not None:
                each.stop()

    def _any_busy(self) -> bool:
        engines = [reference() for reference in tuple(self._all)]
        return any(each._busy() for each in engines if each is not None and not each._stopped.is_set())

    def _run(self) -> None:
        for reference in self._caches:
            cache = reference()
            chunks = [] if cache is None else list(_chunks(cache.memory))
            del cache
            for address, size in chunks:
                while self._any_busy():
                    if self._stopped.wait(PAUSE):
                        return
                cache = reference()  # keeps the memory during the call
                if cache is None:
                    break
                if self._stopped.is_set() or not populate(address, size):
                    return
                del cache


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


atexit.register(CachePrefault.stop_all)
