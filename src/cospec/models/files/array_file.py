"""Named arrays in memory, or in a file that is mapped: the packed weights of a model.

A file holds the arrays, each at a multiple of 64 bytes, then a description in JSON, and at the end the hash and the
length of the description. The description has a checksum of each array, so damage anywhere in the file is found.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cospec.native.library import address, checksum

Bytes = NDArray[np.uint8]
Fill = Callable[[int], object]
"""Writes the bytes of an array to an address."""

ALIGNMENT = 64
_MAGIC = b"cospec-a"
_END = struct.Struct("<32sQ8s")  # hash and bytes of the description, magic
_HUGE_PAGE = 2 << 20
_ARENA = 64 << 20  # bytes; arrays of this size have memory of their own


@dataclass(frozen=True, slots=True, eq=False)
class PackedModel:
    """A packed model.

    Attributes:
        facts: numbers and names, which JSON can hold.
        arrays: bytes by name; each begins at a multiple of 64 bytes.
    """

    facts: Mapping[str, Any]
    arrays: Mapping[str, Bytes]


class Arrays(Protocol):
    """Where arrays are stored."""

    def add(self, name: str, size: int, fill: Fill) -> None:
        """Store an array of ``size`` bytes.

        Raises:
            OSError: a file has no room.
        """

    def keep(self, name: str, data: Bytes) -> None:
        """Store bytes that exist; memory keeps them without a copy.

        Raises:
            OSError: a file has no room.
        """


class ArrayMemory:
    """Arrays in memory of huge pages, because every forward touches each page once.

    Attributes:
        arrays: by name.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Bytes] = {}
        self._free: Bytes = np.empty(0, np.uint8)

    def add(self, name: str, size: int, fill: Fill) -> None:
        """See ``Arrays``."""
        self.arrays[name] = self._reserve(size)
        if size:
            fill(address(self.arrays[name]))

    def keep(self, name: str, data: Bytes) -> None:
        """See ``Arrays``."""
        self.arrays[name] = data

    def _reserve(self, size: int) -> Bytes:
        padded = _padded(size)
        if padded > len(self._free):
            fresh = huge_pages(max(padded, _ARENA))
            if padded >= _ARENA:
                return fresh[:size]
            self._free = fresh
        found, self._free = self._free[:size], self._free[padded:]
        return found


class ArrayFileWriter:
    """Writes the arrays of a file one after another.

    Args:
        limit: bytes of the file.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._stream, self._limit = path.open("wb"), limit
        self._entries: dict[str, tuple[int, int, int]] = {}
        self._buffer: Bytes = np.empty(0, np.uint8)

    def add(self, name: str, size: int, fill: Fill) -> None:
        """See ``Arrays``."""
        if size > len(self._buffer):
            self._buffer = huge_pages(size)
        if size:
            fill(address(self._buffer))
        self.keep(name, self._buffer[:size])

    def keep(self, name: str, data: Bytes) -> None:
        """See ``Arrays``."""
        start, size = self._stream.tell(), data.nbytes
        if start + _padded(size) > self._limit:
            raise OSError(errno.EFBIG, f"the packed weights take more than {self._limit} bytes")
        self._entries[name] = (start, size, checksum(data))
        self._stream.write(data.data)
        self._stream.write(bytes(_padded(size) - size))

    def finish(self, key: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write the description.

        Raises:
            OSError: the file has no room.
        """
        text = json.dumps({"key": key, "facts": facts, "arrays": self._entries}).encode()
        self._stream.write(text + _END.pack(hashlib.sha256(text).digest(), len(text), _MAGIC))
        self._stream.close()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_arrays(path: Path, key: Mapping[str, Any], check: bool = True) -> PackedModel:
    """Map the arrays of a file.

    Args:
        key: the key that the file must have.
        check: compare the checksums, which reads all arrays.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or has another key.
    """
    with path.open("rb") as stream:
        whole = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    found = _description(whole)
    if found["key"] != json.loads(json.dumps(key)):
        raise ValueError("the file belongs to other weights")
    arrays = {name: whole[start : start + size] for name, (start, size, _) in found["arrays"].items()}
    if check:
        damaged = [name for name, (_, _, expected) in found["arrays"].items() if checksum(arrays[name]) != expected]
        if damaged:
            raise ValueError(f"the array {damaged[0]} is damaged")
    return PackedModel(found["facts"], arrays)


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
