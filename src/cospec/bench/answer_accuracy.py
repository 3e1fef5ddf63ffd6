"""Accuracy of written answers: final answers of GSM8K, unit tests of HumanEval, each with a 95% interval."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cospec.bench.sandbox import USUAL, SandboxLimits, run_program
from cospec.errors import InvalidInput, reason, words
from cospec.training.correct_answers import final_answer
from cospec.training.recipe import AnswerRule

FORMATS = "GSM8K (question, answer) or HumanEval (task_id, prompt, entry_point, test)"
NEXT_QUESTION = "\nQuestion:"
OUTSIDE = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")  # ends of a function's body, as in HumanEval's paper
RULE = AnswerRule()
REFERENCE = AnswerRule(pattern=r"####\s*(-?[\d,]+(?:\.\d+)?)")
Z = 1.959964  # of a 95% interval


@dataclass(frozen=True, slots=True)
class Task:
    """One question.

    Attributes:
        wrong: returns why a completion is wrong; empty for a right one.
    """

    id: str
    prompt: str
    wrong: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Right answers of all answers, with Wilson's 95% interval."""

    right: int
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """Return both ends."""
        n, share = self.count, self.right / self.count
        middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.right}/{self.count} = {self.right / self.count:.3f} ({low:.3f} to {high:.3f})"


def read_tasks(path: Path, limit: int | None = None, limits: SandboxLimits = USUAL) -> list[Task]:
    """Read the first ``limit`` tasks of a file of JSON lines in the public format of GSM8K or HumanEval.

    Raises:
        InvalidInput: the file is unreadable, empty, or of another format. The error names the line.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("dataset_path", str(path), f"a readable file of JSON lines ({reason(error)})") from None
    if not lines:
        raise InvalidInput("dataset_path", words(f"{path}, which holds no tasks"), FORMATS)
    return [_task(line, number, limits) for number, line in enumerate(lines[:limit], 1)]


def measure(
    tasks: Sequence[Task], write: Callable[[Sequence[str]], Sequence[str]]
) -> tuple[Accuracy, Mapping[str, str]]:
    """Return the accuracy of ``write``, which completes prompts, and why each wrong completion is wrong, by task."""
    texts = write([task.prompt for task in tasks])
    reasons = {task.id: task.wrong(text) for task, text in zip(tasks, texts, strict=True)}
    wrong = {id: reason for id, reason in reasons.items() if reason}
    return Accuracy(len(tasks) - len(wrong), len(tasks)), wrong


def answer_is_wrong(reference: str, written: str) -> str:
    """Compare the final number of a completion with the number after ``####`` of the reference."""
    right = final_answer(reference, REFERENCE)
    text = written.partition(NEXT_QUESTION)[0]
    found = final_answer(text, REFERENCE if "####" in text else RULE)
    return "" if found is not None and found == right else f"answer {found} instead of {right}"


def program_of(prompt: str, written: str, test: str, entry_point: str) -> str:
    """Return the program that tests a completion: the text until the function's body ends, then the tests."""
    ends = [place for mark in OUTSIDE if (place := written.find(mark)) >= 0]
    return f"{prompt}{written[: min(ends, default=len(written))]}\n\n{test}\n\ncheck({entry_point})\n"


def _task(line: str, number: int, limits: SandboxLimits) -> Task:
    try:
        given: Any = json.loads(line)
        if "question" in given:
            reference = str(given["answer"])
            if final_answer(reference, REFERENCE) is None:
                raise ValueError("an answer without ####")
            prompt = f"Question: {given['question']}\nAnswer:"
            return Task(str(given.get("id", number)), prompt, lambda text: answer_is_wrong(reference, text))
        prompt, test, entry = (str(given[key]) for key in ("prompt", "test", "entry_point"))
        if not re.fullmatch(r"\w+", entry):
            raise ValueError("an entry_point that is no name")
        return Task(
            str(given["task_id"]), prompt, lambda text: run_program(program_of(prompt, text, test, entry), limits)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"dataset_path, line {number}", words(f"not readable ({error})"), FORMATS) from None
