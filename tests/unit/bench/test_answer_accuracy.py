"""Answers and programs are judged as the data sets ask; a program that runs wild costs its own answer alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cospec.bench.answer_accuracy import Accuracy, measure, read_tasks
from cospec.bench.sandbox import SandboxLimits, run_program
from cospec.errors import InvalidInput

GSM8K = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs 1,000 and a boat 250. Both?", "answer": "1000 + 250 = 1250\n#### 1,250"},
]
HUMAN_EVAL = [
    {
        "task_id": "T/0", "prompt": "def double(x):\n", "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    },
    {
        "task_id": "T/1", "prompt": "def first(items):\n", "entry_point": "first",
        "test": "def check(candidate):\n    assert candidate([3, 1]) == 3\n",
    },
]  # fmt: skip


def file(folder: Path, rows: Sequence[object]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ((" She has 7.\nQuestion: 9?", " So #### 1250.00"), 2),
        ((" #### 7 which is not 8", " 1,250 in all"), 2),
        ((" It is 8.", " no number"), 0),
    ],
)
def test_final_numbers_are_compared(tmp_path: Path, written: tuple[str, str], right: int) -> None:
    tasks = read_tasks(file(tmp_path, GSM8K))

    def model(prompts: Sequence[str]) -> Sequence[str]:
        assert prompts[0] == f"Question: {GSM8K[0]['question']}\nAnswer:"
        return written

    accuracy, wrong = measure(tasks, model)
    assert accuracy == Accuracy(right, 2) and len(wrong) == 2 - right


def test_tests_run_against_the_body_alone(tmp_path: Path) -> None:
    tasks = read_tasks(file(tmp_path, HUMAN_EVAL))
    bodies = ["    return 2 * x\n\nprint(double)\nraise SystemExit\n", "    return items[-1]\n"]
    accuracy, wrong = measure(tasks, lambda prompts: bodies)
    assert accuracy == Accuracy(1, 2) and wrong == {"T/1": "AssertionError"}


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("x = 1", ""),
        ("raise ValueError('no')", "ValueError: no"),
        ("import os; os._exit(0)", "exit status 0"),
        ("raise SystemExit(0)", "exit status 0"),
        ("while True: pass", "more than 1 s"),
        ("import time; time.sleep(60)", "more than 1 s"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import socket; socket.socket()", "OSError: sockets are off"),
        ("open('f', 'w').write('x' * (1 << 21))", "File too large"),
        ("import os; assert 'HOME' not in os.environ", ""),
    ],
)
def test_a_program_has_limits(program: str, why: str) -> None:
    found = run_program(program, SandboxLimits(1.0, 1 << 29))
    assert (why in found) and bool(found) == bool(why), found


def test_intervals_are_wilsons() -> None:
    low, high = Accuracy(0, 10).interval
    assert low == pytest.approx(0.0, abs=1e-9) and high == pytest.approx(0.2775, abs=1e-3)
    low, high = Accuracy(8, 10).interval
    assert low == pytest.approx(0.4902, abs=1e-3) and high == pytest.approx(0.9433, abs=1e-3)


@pytest.mark.parametrize(
    "row", [{"text": "x"}, {"question": "q", "answer": "no mark"}, {**HUMAN_EVAL[0], "entry_point": "a; b"}, [1]]
)
def test_other_formats_are_named(tmp_path: Path, row: object) -> None:
    with pytest.raises(InvalidInput, match="line 2"):
        read_tasks(file(tmp_path, [GSM8K[0], row]))
    assert len(read_tasks(file(tmp_path, [GSM8K[0], row]), 1)) == 1
