"""Prompts from every format that is known, and one sentence for what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cospec.bench.datasets import load, load_all, sample
from cospec.bench.request_record import Prompt
from cospec.errors import InvalidInput

DATA = Path(__file__).resolve().parents[3] / "examples" / "data"
FORMATS = {
    "spec-bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["a", "b"]},
        Prompt("81", "Write.", "writing", "a"),
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "  pass", "entry_point": "f"},
        Prompt("HumanEval/0", "def f():", "code", "  pass"),
    ),
    "gsm8k": ({"question": "1+1?", "answer": "2"}, Prompt("line 1", "Question: 1+1?\nAnswer:", "math", "2")),
    "prompt": ({"prompt": "Hello"}, Prompt("line 1", "Hello")),
    "turns": ({"id": 7, "turns": ["Hello"]}, Prompt("7", "Hello")),
    "messages": (
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]},
        Prompt("line 1", "Hi"),
    ),
}
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "A text without a question."}]},
]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_known_by_their_content(tmp_path: Path, name: str) -> None:
    line, prompt = FORMATS[name]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(line) + "\n\n", encoding="utf-8")
    assert load(path) == [prompt]


def test_share_gpt_is_one_list_and_skips_answers_without_prompts(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    path.write_text(json.dumps(SHAREGPT, indent=1), encoding="utf-8")
    assert load(path) == [Prompt("a", "Hi", "", "Hello.")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2"),
        ('{"prompt": "a"}\n["b"]', "line 2, is list"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2, is an object with text"),
        ('{"prompt": "a"}\n{"turns": []}', "line 2, is an object whose turns"),
        ('{"prompt": ""}', "line 1"),
        ('[{"prompt": "a"}, {"conversations": [{"who": 1}]}]', "item 2"),
        ("[1,\n2", "line 2"),
        ("", "holds no prompts"),
    ],
)
def test_a_bad_file_is_reported_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=expected) as caught:
        load(path)
    assert "allowed is" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="readable"):
        load(tmp_path / "none.jsonl")


def test_domains_alternate_and_the_seed_decides() -> None:
    prompts = [Prompt(f"{domain}{i}", "x", domain) for domain, n in (("a", 4), ("b", 2)) for i in range(n)]
    taken = sample(prompts, 6, seed=1)
    assert [prompt.category for prompt in taken] == ["a", "b", "a", "b", "a", "a"]
    assert taken == sample(prompts, 6, seed=1) and sorted(p.id for p in taken) == sorted(p.id for p in prompts)
    assert any(sample(prompts, 6, seed=1) != sample(prompts, 6, seed=other) for other in range(2, 6))


def test_prompts_repeat_only_when_all_were_taken() -> None:
    taken = sample([Prompt("a", "x"), Prompt("b", "y")], 5, seed=0)
    assert len({prompt.id for prompt in taken}) == 5 and {prompt.text for prompt in taken[:2]} == {"x", "y"}


def test_shipped_files_are_read_with_their_domains() -> None:
    prompts = load_all([DATA / name for name in ("code.jsonl", "math.jsonl", "prose.jsonl", "specbench_sample.jsonl")])
    assert len(prompts) == 100 + 200 + 100 + 56
    assert {"code", "math", "prose", "writing"} <= {prompt.category for prompt in prompts}


def test_a_file_names_the_domain_of_prompts_that_have_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}')
    assert load_all([path])[0].category == "mine"
