"""The class of a tokenizer is the one that transformers chooses, with an import of torch or without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import AutoTokenizer

from cospec.models.hf_tokenizer import tokenizer_of
from server.fake_engine import write_tokenizer

LLAMA = {"model_type": "llama"}


def chosen(folder: Path, tokenizer: dict[str, Any], model: dict[str, Any] | None) -> bool:
    """Change a folder's configurations, compare its tokenizer with transformers', and return who chose the class."""
    write_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | tokenizer))
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model))
    expected = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with patch.object(AutoTokenizer, "from_pretrained", side_effect=AutoTokenizer.from_pretrained) as asked:
        found = tokenizer_of(folder, local_files_only=True)
    assert type(found) is type(expected)
    text = "def f(x):\n  return 'ü'<|end|>"
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert (found.eos_token, found.chat_template) == (expected.eos_token, expected.chat_template)
    return bool(asked.called)


@pytest.mark.parametrize("model", [None, LLAMA, {**LLAMA, "auto_map": {"AutoModel": "code.Model"}}])
@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_the_plain_class_is_known(tmp_path: Path, name: str, model: dict[str, Any] | None) -> None:
    assert not chosen(tmp_path, {"tokenizer_class": name}, model)


@pytest.mark.parametrize(
    ("tokenizer", "model"),
    [
        ({"tokenizer_class": "TokenizersBackend"}, {"model_type": "qwen2"}),
        ({"tokenizer_class": "Qwen2Tokenizer"}, LLAMA),
        ({"tokenizer_class": None}, LLAMA),
    ],
)
def test_other_classes_are_for_transformers_to_choose(
    tmp_path: Path, tokenizer: dict[str, Any], model: dict[str, Any]
) -> None:
    assert chosen(tmp_path, tokenizer, model)


@pytest.mark.parametrize("text", ["[1]", "{", '{"tokenizer_class": "TokenizersBackend", "auto_map": {}}', "[" * 10_000])
def test_a_configuration_that_says_nothing_is_for_transformers_to_read(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with patch.object(AutoTokenizer, "from_pretrained", return_value="transformers'"):
        assert tokenizer_of(tmp_path) == "transformers'"
