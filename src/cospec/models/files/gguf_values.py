"""Reads the metadata of a GGUF file by type, so that a value of another type ends in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, TypeVar

from cospec.errors import ModelError
from cospec.models.files.gguf_file import GgufFile

Default = TypeVar("Default")


class GgufValues:
    """The values of the keys ``PREFIX.key``.

    Each reader returns ``default`` where the file lacks the key.

    Raises:
        ModelError: a value has another type or range; the sentence names file, key and what is allowed.
    """

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file, self._prefix = file, prefix

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return self._name(key) in self.file.metadata

    def required(self, key: str, least: int = 1) -> int:
        """Return a positive integer that the file must have; the values of all layers must be equal."""
        found = self.file.metadata.get(self._name(key))
        several: list[Any] = found if isinstance(found, list) else [found]
        if found is None:
            raise ModelError(f"The file {self.file.path} lacks {self._name(key)}.")
        if any(each != several[0] for each in several):
            raise ModelError(f"The file {self.file.path} has different layers in {self._name(key)}.")
        if not several or not _is_integer(several[0], least):
            raise self._refused(key, found, f"an integer of at least {least}")
        return int(several[0])

    def integer(self, key: str, default: Default, least: int = 0) -> int | Default:
        """Return an integer of at least ``least``."""
        found: int | Default = self._read(
            key, default, lambda value: _is_integer(value, least), f"an integer of at least {least}"
        )
        return found

    def real(self, key: str, default: Default) -> float | Default:
        """Return a finite number."""
        found: float | Default = self._read(key, default, _is_real, "a finite number")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        return bool(self._read(key, default, lambda value: isinstance(value, bool), "true or false"))

    def text(self, key: str, default: Default) -> str | Default:
        """Return a text."""
        found: str | Default = self._read(key, default, lambda value: isinstance(value, str), "a text")
        return found

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, empty where the file lacks the key."""
        found = self._read(key, [], lambda value: _all(value, lambda each: isinstance(each, str)), "a list of texts")
        return list(found)

    def numbers(self, key: str, count: int) -> list[float]:
        """Return a list of ``count`` finite numbers, empty where the file lacks the key."""
        found = self._read(
            key, [], lambda value: _all(value, _is_real) and len(value) == count, f"a list of {count} numbers"
        )
        return list(found)

    def _name(self, key: str) -> str:
        return f"{self._prefix}.{key}"

    def _read(self, key: str, default: Default, fits: Callable[[Any], bool], allowed: str) -> Any:
        if not self.has(key):
            return default
        found = self.file.metadata[self._name(key)]
        if not fits(found):
            raise self._refused(key, found, allowed)
        return found

    def _refused(self, key: str, found: Any, allowed: str) -> ModelError:
        shown = repr(found[:4] if isinstance(found, list | str) else found)[:40]
        return ModelError(f"The file {self.file.path} has {shown} in {self._name(key)}; allowed is {allowed}.")


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _all(found: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(found, list) and all(map(fits, found))
