"""Packed weights on disk, in the user's cache directory: a second start reads the file of the first.

Models of one process that read the same file share the weights in memory.

A file belongs to its key: the weight files, the options that change the packed weights, and the code that packs them.
Large weight files count by name, inode, size, times and a sample of their contents. A write changes ``ctime``, which
programs cannot set, so a changed file has another key. Small files count by their contents. Small models are kept too,
because packing some models imports transformers, which takes longer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from cospec.errors import InvalidInput
from cospec.machine import cache_directory
from cospec.models.config_cache import transformers_version
from cospec.models.files.array_file import ArrayMemory, ArrayWriter, PackedModel, read_arrays
from cospec.native import library

VARIABLE = "COSPEC_WEIGHT_CACHE_BYTES"
DEFAULT_BYTES = 32 << 30
SMALL = 16 << 20  # bytes of a weight file that counts by its contents
_SAMPLES, _SAMPLE = 64, 64 << 10
_SETTLED_NS = 2_000_000_000  # a file system may give two changes in a shorter time the same time
_RESERVE = 1 << 30  # bytes of the disk that the cache leaves free
_ABANDONED = 3600  # seconds after which an unfinished file belongs to no process
_SUFFIX = ".weights"

_log = logging.getLogger(__name__)
_in_use: WeakValueDictionary[Path, PackedModel] = WeakValueDictionary()
"""Packed weights that models of this process run on, by their files."""

Pack = Callable[[ArrayMemory], dict[str, Any]]
"""Packs a model into memory, and returns its facts."""


@dataclass(frozen=True, slots=True)
class WeightCache:
    """The cache with its limits.

    Attributes:
        max_bytes: of all files; the least recently used files are removed. 0 switches the cache off.
    """

    max_bytes: int = 0

    @classmethod
    def of(cls, max_bytes: int | None) -> WeightCache:
        """Return the cache of the option ``weight_cache_bytes``; None takes the environment variable or the default.

        Raises:
            InvalidInput: the environment variable is not a number of bytes.
        """
        if max_bytes is not None:
            return cls(max_bytes)
        given = os.environ.get(VARIABLE, str(DEFAULT_BYTES))
        if not given.isdecimal():
            raise InvalidInput(VARIABLE, given, "a number of bytes, 0 for no cache")
        return cls(int(given))

    def packed(self, name: str, files: Sequence[Path], how: Mapping[str, Any], size: int, pack: Pack) -> PackedModel:
        """Return packed weights: in use already, from the cache, or packed and stored for later starts.

        Args:
            name: of the model, for its file and the log.
            files: of the weights and their configuration.
            how: options that change the packed weights.
            size: about the bytes of the packed weights.
        """
        key = self._key(files, how) if self.max_bytes and size <= self.max_bytes else None
        if key is None:
            return _in_memory(pack)
        text = json.dumps(key, sort_keys=True).encode()
        path = folder() / f"{name[:64]}-{hashlib.sha256(text).hexdigest()[:24]}{_SUFFIX}"
        try:
            found = _in_use.setdefault(path, _in_use.get(path) or read_arrays(path, key))
            with suppress(FileNotFoundError):
                os.utime(path)  # the time of the last use
            return found
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("the packed weights in %s are not used (%s) and are packed again", path, error)
        try:
            unfinished = self._new_file(path.parent, size)
        except OSError as error:
            _log.warning("the packed weights of %s are not stored: %s", name, error)
            return _in_memory(pack)
        with unfinished as writer:
            packed = _in_memory(pack, writer)
            try:
                writer.finish(key, packed)
                if self._key(files, how) != key:
                    raise OSError(errno.EBUSY, "the weight files changed while they were read")
                self._keep(writer.path, path)
            except OSError as error:
                _log.warning("the packed weights of %s are not stored: %s", name, error)
                return packed
        return _in_use.setdefault(path, packed)

    def _key(self, files: Sequence[Path], how: Mapping[str, Any]) -> dict[str, Any] | None:
        known = [identity(file) for file in files]
        if None in known:
            return None
        return {"files": known, "how": dict(how), "code": _code(), "kernels": library.build()}

    def _new_file(self, parent: Path, size: int) -> ArrayWriter:
        """Make room for about ``size`` bytes, and begin a file.

        Raises:
            OSError: the disk has no room.
        """
        parent.mkdir(parents=True, exist_ok=True)
        self._remove_oldest(self.max_bytes - size)
        if shutil.disk_usage(parent).free < size + _RESERVE:
            raise OSError(errno.ENOSPC, f"the disk of {parent} has no room for {size} bytes")
        handle, unfinished = tempfile.mkstemp(_SUFFIX, ".", parent)
        os.close(handle)
        return ArrayWriter(Path(unfinished))

    def _keep(self, unfinished: Path, path: Path) -> None:
        """Give a whole file its name, within the limit.

        Raises:
            OSError: the cache has no room.
        """
        size = unfinished.stat().st_size
        if size > self.max_bytes:
            raise OSError(errno.EFBIG, f"they take {size} bytes, and the cache has {self.max_bytes}")
        self._remove_oldest(self.max_bytes - size)
        unfinished.replace(path)

    def _remove_oldest(self, allowed: int) -> None:
        """Remove unfinished files of ended processes, and then the oldest files until ``allowed`` bytes are left."""
        total = 0
        for used, size, file in sorted(_files(), reverse=True):
            if file.name.startswith("."):
                remove = time.time() - used > _ABANDONED
            else:
                total += size
                remove = total > allowed
            if remove:
                file.unlink(missing_ok=True)  # processes that map the file keep its contents


NO_CACHE = WeightCache()


def folder() -> Path:
    """Return the folder of the files."""
    return cache_directory() / "weights"


def usage() -> tuple[int, int]:
    """Return the number of files in the cache, and their bytes."""
    sizes = [size for _, size, _ in _files()]
    return len(sizes), sum(sizes)


def _files() -> list[tuple[float, int, Path]]:
    """Return time of the last use, bytes and path of each file, unfinished files included."""
    found = []
    for file in folder().glob(f"*{_SUFFIX}"):
        try:
            facts = file.stat()
        except OSError:  # another process was faster to remove the file
            continue
        found.append((facts.st_mtime, facts.st_size, file))
    return found


def identity(file: Path, small: int = SMALL) -> list[Any] | None:
    """Return what distinguishes a file's contents; None if the file changed so recently that times do not tell.

    Args:
        small: bytes up to which the whole contents count.

    Raises:
        OSError: the file is unreadable.
    """
    facts = file.stat()
    with file.open("rb") as stream:
        if facts.st_size <= small:
            return [file.name, hashlib.sha256(stream.read()).hexdigest()]
        if time.time_ns() - max(facts.st_ctime_ns, facts.st_mtime_ns) < _SETTLED_NS:
            return None
        sample = hashlib.sha256()
        for number in range(_SAMPLES):
            stream.seek(number * (facts.st_size - _SAMPLE) // (_SAMPLES - 1))
            sample.update(stream.read(_SAMPLE))
    times = (facts.st_mtime_ns, facts.st_ctime_ns)
    return [str(file.absolute()), facts.st_ino, facts.st_size, *times, sample.hexdigest()]


def _in_memory(pack: Pack, writer: ArrayWriter | None = None) -> PackedModel:
    memory = ArrayMemory(writer)
    facts = pack(memory)
    return PackedModel(facts, memory.arrays, frozenset(memory.kept))


@cache
def _code() -> str:
    """Return a hash of the modules that read and pack weights, and the version of transformers' configurations."""
    found = hashlib.sha256(transformers_version().encode())
    package = Path(__file__).parents[1]
    for part in ("models", "native"):
        for file in sorted((package / part).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
