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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class ArrayMemory:
    """Arrays in memory of huge pages, because every forward touches each page once.

    Attributes:
        arrays: by name.
        kept: names of the arrays that ``keep`` stored.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Bytes] = {}
        self.kept: set[str] = set()
        self._free: Bytes = np.empty(0, np.uint8)

    def add(self, name: str, size: int, fill: Fill) -> None:
        """Make an array of ``size`` bytes."""
        self.arrays[name] = self._reserve(size)
        fill(self.arrays[name])

    def keep(self, name: str, data: Bytes) -> None:
        """Store bytes that exist, without a copy."""
        self.arrays[name] = data
        self.kept.add(name)

    def _reserve(self, size: int) -> Bytes:
        padded = _padded(size)
        if padded > len(self._free):
            fresh = huge_pages(max(padded, _ARENA))
            if padded >= _ARENA:
                return fresh[:size]
            self._free = fresh
        found, self._free = self._free[:size], self._free[padded:]
        return found


def write_arrays(path: Path, key: Mapping[str, Any], model: PackedModel) -> None:
    """Write a packed model under a key.

    Raises:
        OSError: the file has no room.
    """
    entries: dict[str, tuple[int, int, int]] = {}
    with path.open("wb") as stream:
        for name, data in model.arrays.items():
            entries[name] = (stream.tell(), data.nbytes, checksum(data))
            stream.write(data.data)
            stream.write(bytes(_padded(data.nbytes) - data.nbytes))
        description = {"key": key, "facts": model.facts, "arrays": entries, "kept": sorted(model.kept)}
        text = json.dumps(description).encode()
        stream.write(text + _END.pack(hashlib.sha256(text).digest(), len(text), _MAGIC))


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
