"""Named arrays in memory and in a file: the packed weights of a model.

A file holds the arrays, each at a multiple of 64 bytes, then a description in JSON. The file ends with the hash and the
length of the description. The description has a checksum of each array, so damage anywhere in the file is found.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cospec.machine import usable_processors
from cospec.native.library import address, checksum

Bytes = NDArray[np.uint8]
Fill = Callable[[Bytes], object]
"""Writes the bytes of an array."""

ALIGNMENT = 64
_MAGIC = b"cospec-a"
_END = struct.Struct("<32sQ8s")  # hash and bytes of the description, magic
_HUGE_PAGE = 2 << 20
_PART = 16 << 20  # bytes that a thread reads
_ARENA = 64 << 20  # bytes; arrays of this size have memory of their own


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedModel:
    """A packed model.

    Attributes:
        facts: numbers and names, which JSON can hold.
        arrays: bytes by name; added arrays begin at a multiple of 64 bytes.
        kept: names of arrays that existed before. A forward reads few rows of them.
    """

    facts: Mapping[str, Any]
    arrays: Mapping[str, Bytes]
    kept: frozenset[str]


class ArrayWriter:
    """Writes a packed model to a file in a thread of its own, each array while the next ones are made.

    Leaving the block removes the file, unless the file has another name by then.

    Args:
        path: of the unfinished file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("wb")
        self._entries: dict[str, tuple[int, int, int]] = {}
        self._thread = ThreadPoolExecutor(1, "cospec-write-weights")
        self._writes: list[Future[None]] = []
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        with suppress(OSError):  # of bytes that had no room
            self._stream.close()
        self.path.unlink(missing_ok=True)

    def add(self, name: str, data: Bytes) -> None:
        """Write an array, which may not change any more."""
        self._writes.append(self._thread.submit(self._write, name, data))

    def finish(self, key: Mapping[str, Any], model: PackedModel) -> None:
        """Wait for the arrays of the model, describe them under a key, and close the file.

        Raises:
            OSError: the file has no room.
        """
        for write in self._writes:
            write.result()
        description = {"key": key, "facts": model.facts, "arrays": self._entries, "kept": sorted(model.kept)}
        text = json.dumps(description).encode()
        self._stream.write(text + _END.pack(hashlib.sha256(text).digest(), len(text), _MAGIC))
        self._stream.close()

    def _write(self, name: str, data: Bytes) -> None:
        if self._failed:
            return
        self._failed = True  # unless the array is written
        self._entries[name] = (self._stream.tell(), data.nbytes, checksum(data))
        self._stream.write(data.data)
        self._stream.write(bytes(_padded(data.nbytes) - data.nbytes))
        self._failed = False


class ArrayMemory:
    """Arrays in memory of huge pages, because every forward touches each page once.

    Args:
        writer: writes each array to a file too; None does not.

    Attributes:
        arrays: by name.
        kept: names of the arrays that ``keep`` stored.
    """

    def __init__(self, writer: ArrayWriter | None = None) -> None:
        self.arrays: dict[str, Bytes] = {}
        self.kept: set[str] = set()
        self._writer = writer
        self._free: Bytes = np.empty(0, np.uint8)

    def add(self, name: str, size: int, fill: Fill) -> None:
        """Make an array of ``size`` bytes."""
        data = self._reserve(size)
        fill(data)
        self._made(name, data)

    def keep(self, name: str, data: Bytes) -> None:
        """Store bytes that exist, without a copy."""
        self._made(name, data)
        self.kept.add(name)

    def _made(self, name: str, data: Bytes) -> None:
        self.arrays[name] = data
        if self._writer is not None:
            self._writer.add(name, data)

    def _reserve(self, size: int) -> Bytes:
        padded = _padded(size)
        if padded > len(self._free):
            fresh = huge_pages(max(padded, _ARENA))
            if padded >= _ARENA:
                return fresh[:size]
            self._free = fresh
        found, self._free = self._free[:size], self._free[padded:]
        return found


def read_arrays(path: Path, key: Mapping[str, Any]) -> PackedModel:
    """Read the arrays of a file. Kept arrays are mapped; the others go to huge pages, which forwards read faster.

    Args:
        key: the key that the file must have.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or has another key.
    """
    with path.open("rb", buffering=0) as stream:
        whole = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        found = _description(whole)
        if found["key"] != json.loads(json.dumps(key)):
            raise ValueError("the file belongs to other weights")
        memory, kept = ArrayMemory(), frozenset(found["kept"])
        with ThreadPoolExecutor(usable_processors()) as pool:
            reads: list[Future[None]] = []
            for name, (start, size, _) in found["arrays"].items():
                if name in kept:
                    memory.keep(name, whole[start : start + size])
                    continue
                memory.add(name, size, lambda _: None)
                for part in range(0, size, _PART):
                    into = memory.arrays[name][part : part + _PART]
                    reads.append(pool.submit(_read, stream.fileno(), start + part, into))
            for read in reads:
                read.result()
    damaged = [name for name, (_, _, expected) in found["arrays"].items() if checksum(memory.arrays[name]) != expected]
    if damaged:
        raise ValueError(f"the array {damaged[0]} is damaged")
    return PackedModel(found["facts"], memory.arrays, kept)


def _read(file: int, start: int, into: Bytes) -> None:
    """Fill an array from a place of an open file."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:].data], start + done)
        if not count:
            raise ValueError("the file is too short")
        done += count


def _description(whole: Bytes) -> Any:
    if len(whole) < _END.size:
        raise ValueError("the file is too short")
    digest, size, magic = _END.unpack(whole[-_END.size :].tobytes())
    text = whole[len(whole) - _END.size - size : -_END.size].tobytes() if size + _END.size <= len(whole) else b""
    if magic != _MAGIC or hashlib.sha256(text).digest() != digest:
        raise ValueError("the description is damaged")
    return json.loads(text)


def huge_pages(size: int) -> Bytes:
    """Return memory of zeros, in huge pages where the system has huge pages."""
    mapped = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapped, np.uint8)
    start = -address(whole) % _HUGE_PAGE
    return whole[start : start + size]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
