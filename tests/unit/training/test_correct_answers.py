"""The target's answers that are kept for a drafter are right."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

from cospec.errors import InvalidInput
from cospec.plugin_options import parse
from cospec.training.corpus import Corpus, end_token
from cospec.training.correct_answers import AnswerWriter, final_answer, read_questions
from cospec.training.distill_data import DistillData, DistillOptions
from cospec.training.family import new_model
from cospec.training.generate import WritingPlan
from cospec.training.recipe import AnswerRule, Distillation, TrainingRecipe

RULE = AnswerRule()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 7.", "7"),
        ("First 3, then 1,200 in all", "1200"),
        ("So #### 18", "18"),
        ("half: 2.50", "2.5"),
        ("down to -4.00 degrees", "-4"),
        ("no number", None),
    ],
)
def test_the_last_number_is_the_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text, RULE) == answer


def test_a_pattern_has_a_group() -> None:
    assert final_answer("2 so (B) 3", AnswerRule(pattern=r"\(([A-D])\)")) == "B"
    for pattern in (r"\d+", "("):
        with pytest.raises(InvalidInput, match="a regular expression"):
            parse(AnswerRule, {"pattern": pattern}, "answers.")


def test_the_recipe_on_the_page_for_contributors_is_the_default() -> None:
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"```yaml\ndistillation:\n(.*?)```", page, flags=re.DOTALL)
    found = parse(Distillation, yaml.safe_load(given), "distillation.")
    assert found.answers == RULE and Distillation().answers is None


class Teacher:
    """Answers ``What is a + b?`` wrongly for every second batch place, and with text before the end token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.asked = tokenizer, list[str]()

    def __call__(self, prompts: list[list[int]], length: int, temperature: float, seed: int) -> list[list[int]]:
        found = []
        for place, prompt in enumerate(prompts):
            text = self.tokenizer.decode(prompt)
            self.asked.append(text)
            a, b = (int(word) for word in text.split("is")[1].split("?")[0].split("+"))
            written = self.tokenizer.encode(f" It is {a + b + place % 2}.").ids
            found.append([*written, end_token(self.tokenizer), *written])
        return found


def documents(stream: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    text = tokenizer.decode(stream.tolist(), skip_special_tokens=False)
    return [document.strip() for document in text.split("<|endoftext|>")[:-1]]


def test_wrong_answers_are_left_out(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    questions = read_questions(corpus.train["math"], tokenizer, RULE)
    assert len(questions) > 40 and all(tokenizer.decode(each.prompt).endswith("Answer:") for each in questions)
    teacher = Teacher(tokenizer)
    writer = AnswerWriter(teacher, tokenizer, RULE, tmp_path)
    plan = WritingPlan(10_000, (0.0,), 1, rows=10)
    stream = writer.write(questions, plan)
    kept = documents(stream, tokenizer)
    assert len(teacher.asked) == len(questions)
    assert len(kept) == sum(len(range(0, min(10, len(questions) - n), 2)) for n in range(0, len(questions), 10))
    for text in kept:
        a, b = (int(word) for word in text.split("is")[1].split("?")[0].split("+"))
        assert text.endswith(f"Answer: It is {a + b}.")
    assert np.array_equal(AnswerWriter(_unasked, tokenizer, RULE, tmp_path).write(questions, plan), stream), "resumed"


def _unasked(prompts: list[list[int]], length: int, temperature: float, seed: int) -> list[list[int]]:
    raise AssertionError("the text is in files")


def test_a_target_without_right_answers_is_an_error(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def wrong(prompts: list[list[int]], length: int, temperature: float, seed: int) -> list[list[int]]:
        return [tokenizer.encode(" It is 99.").ids for _ in prompts]

    questions = read_questions(corpus.train["math"], tokenizer, RULE)
    plan = WritingPlan(100, (0.0,), 1)
    with pytest.raises(InvalidInput, match="kept nothing"):
        AnswerWriter(wrong, tokenizer, RULE, tmp_path).write(questions, plan)
    with pytest.raises(InvalidInput, match="without questions"):
        AnswerWriter(wrong, tokenizer, RULE, tmp_path).write([], plan)


def test_a_distillation_reads_right_answers_only(
    recipe: TrainingRecipe, corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    target = new_model(recipe.target, recipe, tokenizer, 1).eval()
    data = DistillData(tokenizer, corpus, tmp_path, Teacher(tokenizer))
    options = recipe.distillation.model_copy(update={"answers": RULE, "corpus_tokens": 64, "written_tokens": 400})
    found = data.make(target, DistillOptions({"math": 1.0}, options, 32, 0), "math")
    corpus_windows, written = found.pools
    assert corpus_windows == 2 and written >= 10
    windows = found.teacher_cache.tokens[corpus_windows:, :-1]  # windows share a token
    read = documents(windows.flatten(), tokenizer)
    assert len(read) >= 5
    for text in read:
        a, b = (int(word) for word in text.split("is")[1].split("?")[0].split("+"))
        assert text.endswith(f"Answer: It is {a + b}."), text
