"""The files of ``cospec generate``: prompts in, results out, and the requests left after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cospec.errors import InvalidInput, is_text, words

Id = str | int
ROW_BEGINS = b'{"id": '  # beginning of every line of a result file


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the prompt file: the turns to answer."""

    id: Id
    line: int
    turns: tuple[str, ...]


def read_batch(path: Path) -> tuple[list[BatchRequest], list[str]]:
    """Return the requests of a file, and a warning for each invalid line.

    Raises:
        InvalidInput: the file is unreadable.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInput("prompts", str(path), f"a readable file ({error.strerror})") from None
    batch_requests: list[BatchRequest] = []
    warnings: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            batch_request = _parse(line, number)
            first = seen.setdefault(key(batch_request.id), number)
            if first != number:
                raise InvalidInput("id", batch_request.id, f"a unique id; line {first} has this id")
            batch_requests.append(batch_request)
        except InvalidInput as error:
            warnings.append(f"line {number}: {error}")
    return batch_requests, warnings


def key(id: Id) -> str:
    """Return an id as text; the ids 1 and "1" differ."""
    return json.dumps(id)


def _parse(line: bytes, number: int) -> BatchRequest:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise InvalidInput("line", words(f"not JSON ({error})"), "a JSON object") from None
    except RecursionError:
        raise InvalidInput("line", words("nested too deeply"), "a JSON object") from None
    if not isinstance(given, dict):
        raise InvalidInput("line", given, "a JSON object")
    id = given.get("id", given.get("question_id", number))
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise InvalidInput("id", id, "a string or a whole number")
    if isinstance(id, str) and not is_text(id):
        raise InvalidInput("id", id, "text of whole Unicode characters")
    return BatchRequest(id, number, _turns(given))


def _turns(given: Mapping[str, Any]) -> tuple[str, ...]:
    if ("prompt" in given) == ("turns" in given):
        found = "both prompt and turns" if "prompt" in given else "neither prompt nor turns"
        raise InvalidInput("line", words(f"an object with {found}"), "an object with either prompt or turns")
    if "prompt" in given:
        if not isinstance(given["prompt"], str) or not given["prompt"]:
            raise InvalidInput("prompt", given["prompt"], "a non-empty string")
        return (given["prompt"],)
    turns = given["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise InvalidInput("turns", turns, "a list of non-empty strings")
    return tuple(turns)


class ResultFile:
    """A file of results as JSON lines, for a run that may continue an earlier run.

    Each result is whole on disk before the next begins. The run holds a lock until ``close``, so only one run writes.
    If a result does not fit on the disk, its partial line is removed. A pipe or a device has no earlier results.

    Raises:
        InvalidInput: the file is not writable, another run writes to the file, or the file has other content.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0  # size of the whole results in bytes
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from None
        self._regular = path.is_file()
        self.done: frozenset[str] = frozenset()
        try:
            if self._regular:
                self._lock()
                self.done = frozenset(self._recover())
        except OSError as error:
            self._file.close()
            raise self._unwritable(error) from None
        except InvalidInput:
            self._file.close()
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, result: Mapping[str, Any]) -> None:
        """Append one result.

        Raises:
            InvalidInput: the result does not fit on the disk; the file is unchanged.
        """
        data = memoryview(json.dumps(result, ensure_ascii=False).encode() + b"\n")
        size = len(data)
        try:
            while data:  # a disk that fills up accepts only a part
                data = data[self._file.write(data) :]
        except OSError as error:
            if self._regular:
                self._file.truncate(self._end)
            raise self._unwritable(error) from None
        self._end += size

    def _unwritable(self, error: OSError) -> InvalidInput:
        return InvalidInput("output", str(self._path), f"a writable file ({error.strerror or error})")

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            shown = words(f"{self._path}, which another run of this command writes")
            raise InvalidInput("output", shown, "another file, or the same command after that run") from None

    def _recover(self) -> Iterable[str]:
        """Return the ids of whole results. Only a truncated last line is removed from the file."""
        ids: list[str] = []
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                id, ended = _id_of(line), line.endswith(b"\n")
                if id is None and (ended or not _may_begin_a_row(line)):
                    shown = words(f"{self._path}, whose line {number} is not a result of this command")
                    raise InvalidInput("output", shown, "a new file, or one that this command wrote")
                if id is None:
                    self._file.truncate(self._end)
                    break
                ids.append(id)
                self._end += len(line)
                if not ended:
                    self._end += self._file.write(b"\n") or 0
                    break
        return ids


def _id_of(line: bytes) -> str | None:
    """Return the id of a result; None if the line is no result."""
    try:
        row = json.loads(line)
        return key(row["id"]) if "text" in row else None
    except (ValueError, TypeError, KeyError):
        return None


def _may_begin_a_row(line: bytes) -> bool:
    """Whether an incomplete line is a truncated result. A truncated result is not valid JSON."""
    try:
        json.loads(line)
    except ValueError:
        return line.startswith(ROW_BEGINS) or ROW_BEGINS.startswith(line)
    return False
