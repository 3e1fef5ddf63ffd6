"""Reading prompts and going on with a file of results."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cospec.cli.batch_io import BatchRequest, ResultFile, key, read_batch
from cospec.errors import InvalidInput


def test_every_kind_of_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"id": "a", "turns": ["x", "y"], "category": "ignored"}\n\n{"question_id": 7, "turns": ["z"]}\n{"prompt": "w"}'
    )
    batch_requests, warnings = read_batch(path)
    assert batch_requests == [BatchRequest("a", 1, ("x", "y")), BatchRequest(7, 3, ("z",)), BatchRequest(4, 4, ("w",))]
    assert warnings == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "a JSON object"),
        (b"{}", "neither prompt nor turns"),
        (b'{"prompt": "a", "turns": ["b"]}', "both prompt and turns"),
        (b'{"prompt": ""}', "non-empty string"),
        (b'{"prompt": 5}', "5"),
        (b'{"turns": []}', "a list of non-empty strings"),
        (b'{"turns": ["a", 1]}', "a list of non-empty strings"),
        (b'{"id": 1.5, "prompt": "a"}', "1.5"),
        (b'{"id": "\\ud800", "prompt": "a"}', "whole Unicode characters"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"id": "same", "prompt": "a"}', "line 1"),
    ],
)
def test_bad_lines_are_reported_by_number(tmp_path: Path, line: bytes, expected: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"id": "same", "prompt": "a"}\n' + line + b'\n{"id": "last", "prompt": "a"}\n')
    batch_requests, warnings = read_batch(path)
    assert [batch_request.id for batch_request in batch_requests] == ["same", "last"]
    (warning,) = warnings
    assert warning.startswith("line 2: ")
    assert expected in warning


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"prompts is .*No such file"):
        read_batch(tmp_path / "none.jsonl")


def test_ids_of_other_types_are_other_ids() -> None:
    assert key(1) != key("1")


def test_results_survive_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        assert results.done == frozenset()
        results.write({"id": "ä", "text": ""})
        results.write({"id": 2, "text": ""})
    path.write_bytes(path.read_bytes() + b'{"id": "torn", "te')
    with ResultFile(path) as results:
        assert results.done == {key("ä"), key(2)}
        results.write({"id": 3, "text": ""})
    assert [line[:7] for line in path.read_text().splitlines()] == ['{"id": ', '{"id": ', '{"id": ']
    assert path.read_text().splitlines()[-1] == '{"id": 3, "text": ""}'


def test_a_last_result_without_its_line_break_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": 1, "text": "a"}')
    with ResultFile(path) as results:
        assert results.done == {key(1)}
        results.write({"id": 2, "text": "b"})
    assert path.read_text() == '{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n'


@pytest.mark.parametrize(
    "content",
    [
        "hello\n",
        '{"text": 1}\n',
        "[1]\n",
        "notes without a line break",
        '{"id": 1, "prompt": "a"}\n',
        '{"id": 1, "prompt": "a"}',
        '{"prompt": "a"}',
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(InvalidInput, match="line 1"):
        ResultFile(path)
    assert path.read_text() == content


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="output is"):
        ResultFile(tmp_path / "no" / "such" / "folder.jsonl")


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """While it is open, a file takes so many bytes and no more, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_result_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = {"id": 1, "text": "a"}, {"id": 2, "text": "b" * 200}
    with ResultFile(path) as results:
        results.write(first)
        whole = path.read_bytes()
        with disk_of(100), pytest.raises(InvalidInput, match=r"output is .*"):
            results.write(second)
        assert path.read_bytes() == whole
    with ResultFile(path) as results:
        assert results.done == {key(1)}
        results.write(second)
    assert len(path.read_text().splitlines()) == 2


def test_a_second_run_is_refused_while_the_first_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as first:
        first.write({"id": 1, "text": "a"})
        with pytest.raises(InvalidInput, match="which another run of this command writes"):
            ResultFile(path)
        first.write({"id": 2, "text": "b"})
    with ResultFile(path) as later:
        assert later.done == {key(1), key(2)}


def test_a_file_that_was_refused_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    for _ in range(2):
        with pytest.raises(InvalidInput, match="line 1 is not a result"):
            ResultFile(path)
