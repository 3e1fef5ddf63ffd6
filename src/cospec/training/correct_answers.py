"""Text of the target with right answers only: questions whose final answer is known (Minions, section 4).

A document of the corpus is a question, a marker and an answer. The target answers the question. The text is kept only
if its final answer is that of the document, so that a drafter learns no wrong answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cospec.errors import InvalidInput, words
from cospec.training.corpus import end_token, save_array
from cospec.training.generate import Writer, WritingPlan
from cospec.training.recipe import AnswerRule
from cospec.training.trainer import bars


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """The tokens of a question with the marker, and the reference's final answer."""

    prompt: tuple[int, ...]
    answer: str


def final_answer(text: str, rule: AnswerRule) -> str | None:
    """Return the first group of the last match of ``rule.pattern`` without commas; None without a match.

    Numbers of equal value are equal answers: ``1,200`` and ``1200.00``.
    """
    matches = list(re.finditer(rule.pattern, text))
    if not matches:
        return None
    answer = matches[-1][1].replace(",", "").strip()
    return re.sub(r"(\.\d*?)0+$", r"\1", answer).rstrip(".") if re.fullmatch(r"-?\d+\.\d*", answer) else answer


def read_questions(stream: np.ndarray, tokenizer: Tokenizer, rule: AnswerRule) -> list[AnsweredQuestion]:
    """Return the questions of a token stream, ``uint16 [tokens]``; documents without a final answer are left out."""
    found, end = [], end_token(tokenizer)
    for document in np.split(stream, np.flatnonzero(stream == end)):
        text = tokenizer.decode([int(token) for token in document if token != end])
        question, marker, rest = text.partition(rule.marker)
        answer = final_answer(rest, rule)
        if marker and answer is not None:
            prompt = tokenizer.encode(question + marker, add_special_tokens=False).ids
            found.append(AnsweredQuestion(tuple(prompt), answer))
    return found


@dataclass(frozen=True)
class AnswerWriter:
    """Lets the target answer questions, and keeps the right answers.

    Attributes:
        folder: every batch is a file here, so that an interrupted run resumes.
    """

    writer: Writer
    tokenizer: Tokenizer
    rule: AnswerRule
    folder: Path

    def write(self, questions: Sequence[AnsweredQuestion], plan: WritingPlan) -> np.ndarray:
        """Return ``plan.tokens`` tokens of kept documents as one ``uint16`` stream, or fewer where questions run out.

        Every question is asked once per temperature.

        Raises:
            InvalidInput: there is no question, or no answer was right.
        """
        if not questions:
            allowed = f"a pattern and a marker that documents of {self.rule.domain} have"
            raise InvalidInput("distillation.answers", words("a rule without questions"), allowed)
        self.folder.mkdir(parents=True, exist_ok=True)
        order = np.random.default_rng((plan.seed, 4)).permutation(len(questions))
        batches = -(-len(questions) // plan.rows) * len(plan.temperatures)
        pieces: list[np.ndarray] = []
        with bars() as progress:
            bar = progress.add_task("target answers", total=plan.tokens)
            for number in range(batches):
                if sum(len(piece) for piece in pieces) >= plan.tokens:
                    break
                path = self.folder / f"{number:05d}.npy"
                if not path.exists():
                    lap, part = divmod(number, batches // len(plan.temperatures))
                    asked = [questions[place] for place in order[part * plan.rows : (part + 1) * plan.rows]]
                    save_array(path, self._batch(asked, plan, plan.temperatures[lap], number))
                pieces.append(np.load(path))
                progress.update(bar, completed=min(plan.tokens, sum(len(piece) for piece in pieces)))
        stream = np.concatenate(pieces)
        if not len(stream):
            raise InvalidInput("distillation.answers", words("a rule that kept nothing"), "a target with right answers")
        return stream

    def _batch(
        self, asked: Sequence[AnsweredQuestion], plan: WritingPlan, temperature: float, number: int
    ) -> np.ndarray:
        """Return the kept documents of one batch, each with the end token."""
        end = end_token(self.tokenizer)
        written = self.writer(
            [list(each.prompt) for each in asked], plan.length, temperature, plan.seed * 100_003 + number
        )
        kept: list[int] = []
        for question, answer in zip(asked, written, strict=True):
            text = answer[: answer.index(end)] if end in answer else answer
            if final_answer(self.tokenizer.decode(text), self.rule) == question.answer:
                kept += [*question.prompt, *text, end]
        return np.array(kept, dtype=np.uint16)
