"""The files of ``cospec generate``: prompts in, results out, and what is left to do after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cospec.errors import InvalidInput, is_text, words

Id = str | int
ROW_BEGINS = b'{"id": '  # of every line that this command writes


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the prompts' file: what to answer, turn by turn."""

    id: Id
    line: int
    turns: tuple[str, ...]


def read_jobs(path: Path) -> tuple[list[BatchRequest], list[str]]:
    """The jobs of a file, and a complaint for each line that is none.

    Raises:
        InvalidInput: the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInput("prompts", str(path), f"a readable file ({error.strerror})") from None
    jobs: list[BatchRequest] = []
    complaints: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            job = _parse(line, number)
            first = seen.setdefault(key(job.id), number)
            if first != number:
                raise InvalidInput("id", job.id, f"an id of its own, as line {first} has this one")
            jobs.append(job)
        except InvalidInput as error:
            complaints.append(f"line {number}: {error}")
    return jobs, complaints


def key(id: Id) -> str:
    """An id as a text that tells 1 from "1"."""
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
        raise InvalidInput("line", words(f"an object with {found}"), "an object with one of them")
    if "prompt" in given:
        if not isinstance(given["prompt"], str) or not given["prompt"]:
            raise InvalidInput("prompt", given["prompt"], "a string that is not empty")
        return (given["prompt"],)
    turns = given["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise InvalidInput("turns", turns, "a list of strings that are not empty")
    return tuple(turns)


class ResultFile:
    """Results as JSON lines, each whole on disk before the next is begun. Goes on where an earlier run stopped.

    One run at a time has the file: the run holds a lock until ``close``. A result that does not fit on the disk is
    taken back, so that the file holds whole results at any time. A pipe or a device holds nothing to go on from.

    Raises:
        InvalidInput: the file cannot be written, another run writes to the file, or it holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0  # bytes of whole results
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
            InvalidInput: the result does not fit on the disk; the file is as before.
        """
        data = memoryview(json.dumps(result, ensure_ascii=False).encode() + b"\n")
        size = len(data)
        try:
            while data:  # a disk that fills up takes a part first
                data = data[self._file.write(data) :]
        except OSError as error:
            if self._regular:
                self._file.truncate(self._end)
            raise self._unwritable(error) from None
        self._end += size

    def _unwritable(self, error: OSError) -> InvalidInput:
        return InvalidInput("output", str(self._path), f"a file that can be written ({error.strerror or error})")

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            shown = words(f"{self._path}, which another run of this command writes")
            raise InvalidInput("output", shown, "another file, or the same command after that run") from None

    def _recover(self) -> Iterable[str]:
        """Ids of whole results; a last one that was cut off is dropped from the file, and nothing else ever is."""
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
    """The id of a result; None for a line that is none."""
    try:
        row = json.loads(line)
        return key(row["id"]) if "text" in row else None
    except (ValueError, TypeError, KeyError):
        return None


def _may_begin_a_row(line: bytes) -> bool:
    """Whether a line without an end is a result that was cut off, which is no JSON."""
    try:
        json.loads(line)
    except ValueError:
        return line.startswith(ROW_BEGINS) or ROW_BEGINS.startswith(line)
    return False
