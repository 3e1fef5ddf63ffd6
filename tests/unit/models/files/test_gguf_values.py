"""Metadata of another type or range: one sentence names the file, the key and what is allowed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from cospec.errors import CospecError, ModelError
from cospec.models.files.weight_source_selection import open_source
from cospec.models.model_folder import resolve
from harness.gguf_files import rewrite, write_model

WRONG: tuple[Any, ...] = (0, 2**31, -5, "x", float("nan"), [1, 2], None)
TOKENS = [f"{chr(97 + number % 26)}{number}" for number in range(60)] + ["a", "b", "ab", "</s>"]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 1) + [3],
    "tokenizer.ggml.scores": [0.0] * len(TOKENS),
    "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}
ROPE: dict[str, Any] = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.original_context_length": 32,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("gguf")
    plain = write_model(folder / "plain.gguf", transformers.LlamaForCausalLM(config))
    return rewrite(plain, folder / "base.gguf", TOKENIZER | ROPE)


def opened(path: Path) -> str:
    """Describe a file and open its weights; return the error's sentence, empty without an error."""
    try:
        open_source(resolve(str(path)))
    except CospecError as error:
        text = str(error)
        assert text.endswith(".") and "\n" not in text and path.name in text
        return text
    return ""


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("llama.attention.key_length", "x", "has 'x' in llama.attention.key_length; allowed is an integer"),
        ("llama.attention.key_length", float("nan"), "has nan in llama.attention.key_length; allowed is an integer"),
        ("llama.attention.key_length", [1, 2], "has [1, 2] in llama.attention.key_length; allowed is an integer"),
        ("llama.rope.dimension_count", "a", "has 'a' in llama.rope.dimension_count; allowed is an integer"),
        ("llama.rope.dimension_count", 7, "rotates 7 numbers (rope.dimension_count); allowed is an even number"),
        ("llama.rope.freq_base", float("inf"), "has inf in llama.rope.freq_base; allowed is a finite number."),
        ("llama.rope.scaling.type", 5, "has 5 in llama.rope.scaling.type; allowed is a text."),
        ("llama.context_length", -5, "has -5 in llama.context_length; allowed is an integer of at least 1."),
        ("tokenizer.ggml.merges", ["ab"], "has 'ab' in tokenizer.ggml.merges; allowed are two tokens"),
        ("tokenizer.ggml.merges", ["q z"], "has 'q z' in tokenizer.ggml.merges; allowed are two tokens"),
        ("tokenizer.ggml.merges", [1], "has [1] in tokenizer.ggml.merges; allowed is a list of texts."),
        ("tokenizer.ggml.tokens", [1, 2], "has [1, 2] in tokenizer.ggml.tokens; allowed is a list of texts."),
        ("tokenizer.ggml.token_type", [1], "has [1] in tokenizer.ggml.token_type; allowed is a list of 64 numbers."),
        ("tokenizer.ggml.add_bos_token", 3, "has 3 in tokenizer.ggml.add_bos_token; allowed is true or false."),
        ("tokenizer.ggml.eos_token_id", "a", "has 'a' in tokenizer.ggml.eos_token_id; allowed is an integer"),
        ("tokenizer.chat_template", 5, "has 5 in tokenizer.chat_template; allowed is a text."),
    ],
)  # fmt: skip
def test_key_and_allowed_values_are_named(base: Path, tmp_path: Path, key: str, value: Any, why: str) -> None:
    assert why in opened(rewrite(base, tmp_path / "wrong.gguf", {key: value}))


def test_missing_tensor_is_named(base: Path, tmp_path: Path) -> None:
    without = rewrite(base, tmp_path / "wrong.gguf", {}, without="token_embd.weight")
    assert "lacks the tensor token_embd.weight" in opened(without)


def test_any_value_of_any_key_ends_in_a_sentence(base: Path, tmp_path: Path) -> None:
    assert opened(base) == ""
    found = []
    for key in gguf.GGUFReader(base).fields:
        if not key.startswith(("GGUF.", "general.architecture")):
            found += [opened(rewrite(base, tmp_path / "wrong.gguf", {key: value})) for value in WRONG]
    assert sum(map(bool, found)) > len(found) / 2


def test_random_headers_end_in_a_sentence(base: Path, tmp_path: Path) -> None:
    whole, draw = base.read_bytes(), random.Random(1)
    header = min(tensor.data_offset for tensor in gguf.GGUFReader(base).tensors)
    path, refused = tmp_path / "wrong.gguf", 0
    for _ in range(250):
        changed = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 4))):
            changed[draw.randrange(header)] = draw.choice((draw.randrange(256), 255))
        path.write_bytes(changed)
        refused += bool(opened(path))
    assert refused > 60


def test_id_outside_the_vocabulary_is_ignored(base: Path, tmp_path: Path) -> None:
    folder = resolve(str(rewrite(base, tmp_path / "wrong.gguf", {"tokenizer.ggml.eos_token_id": 10**6})))
    assert '"eos_token_id": null' in (folder / "config.json").read_text()


def test_error_is_a_model_error(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        resolve(str(rewrite(base, tmp_path / "wrong.gguf", {"llama.context_length": None})))
