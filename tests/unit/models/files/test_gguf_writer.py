"""Written GGUF files hold what llama.cpp's converter writes, for which ``harness.gguf_files`` stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cospec.errors import InvalidInput, ModelError
from cospec.models.files.gguf_file import GgufFile
from cospec.models.files.gguf_writer import write_gguf
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import load_model, load_tokenizer
from cospec.models.model_folder import resolve
from cospec.models.perplexity import perplexity
from harness.gguf_files import write_model
from harness.gguf_models import MODELS

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "llama-tied": transformers.LlamaConfig(**COMMON, tie_word_embeddings=True, attention_bias=True),
    "llama3": MODELS["llama3"][0],
    "mistral": MODELS["mistral"][0],
    "qwen2": transformers.Qwen2Config(**COMMON),
    "qwen3": transformers.Qwen3Config(**COMMON, head_dim=24),
}


def saved(folder: Path, config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_and_values_are_the_converter_s(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path / "model", CONFIGS[name])
    write_gguf(tmp_path / "own.gguf", tmp_path / "model", open_source(tmp_path / "model"), "f32")
    own = GgufFile.open(tmp_path / "own.gguf")
    other = GgufFile.open(write_model(tmp_path / "other.gguf", model))
    assert own.tensors.keys() == other.tensors.keys()
    for key, tensor in other.tensors.items():
        assert (own.tensors[key].shape, own.tensors[key].type) == (tensor.shape, tensor.type)
        if key == "rope_freqs.weight":
            np.testing.assert_allclose(own.tensors[key].data.view("<f4"), tensor.data.view("<f4"), rtol=1e-6)
        else:
            np.testing.assert_array_equal(own.tensors[key].data, tensor.data)
    assert {key: own.metadata[key] for key in other.metadata} == other.metadata


@pytest.mark.parametrize(("kind", "down"), [("q4_0", "q4_0"), ("q4_k", "q8_0"), ("bf16", "bf16")])
def test_types_of_tensors(tmp_path: Path, kind: str, down: str) -> None:
    """Rows of 96 are no multiple of the blocks of 256."""
    saved(tmp_path / "model", CONFIGS["llama"])
    write_gguf(tmp_path / "a.gguf", tmp_path / "model", open_source(tmp_path / "model"), kind)
    tensors = GgufFile.open(tmp_path / "a.gguf").tensors
    assert tensors["blk.0.ffn_down.weight"].type == down
    assert tensors["blk.0.attn_norm.weight"].type == "f32"
    assert tensors["token_embd.weight"].type == ("bf16" if kind == "bf16" else "q8_0")


def test_refusals(tmp_path: Path) -> None:
    saved(tmp_path / "model", CONFIGS["llama"])
    source = open_source(tmp_path / "model")
    with pytest.raises(InvalidInput, match="q4_9"):
        write_gguf(tmp_path / "a.gguf", tmp_path / "model", source, "q4_9")
    saved(tmp_path / "gemma", transformers.GemmaConfig(**COMMON, head_dim=16))
    with pytest.raises(ModelError, match="of type gemma"):
        write_gguf(tmp_path / "a.gguf", tmp_path / "gemma", source, "q8_0")
    saved(tmp_path / "window", transformers.MistralConfig(**COMMON, sliding_window=16))
    with pytest.raises(ModelError, match="sliding_window 16; allowed in a written file is null"):
        write_gguf(tmp_path / "a.gguf", tmp_path / "window", source, "q8_0")
    saved(tmp_path / "yarn", MODELS["llama-yarn"][0])
    with pytest.raises(ModelError, match="by yarn; allowed in a written file are default and llama3"):
        write_gguf(tmp_path / "a.gguf", tmp_path / "yarn", source, "q8_0")


def test_perplexity_of_a_written_model_is_near(tmp_path: Path) -> None:
    """The perplexity of the zoo's drafter, by hand and in another type; windows do not see each other."""
    folder = resolve("zoo:drafter")
    ids = load_tokenizer(folder).encode("It was a dark and stormy night. The old man went home, and he said that " * 4)
    model = load_model("zoo:drafter")
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses: list[float] = []
    for start in range(0, len(ids) - 1, 16):
        part = ids[start : start + 16]
        with torch.no_grad():
            logits = plain(torch.tensor([part])).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="none").tolist()
        if len(losses) >= 30:
            break
    own = perplexity(model, ids[: start + 16], window=16)
    assert own == pytest.approx(float(np.exp(np.mean(losses))), rel=0.01)
    write_gguf(tmp_path / "a.gguf", folder, open_source(folder), "q8_0")
    after = perplexity(load_model(str(tmp_path / "a.gguf")), ids)
    assert after == pytest.approx(perplexity(model, ids), rel=0.01)
    assert load_tokenizer(resolve(str(tmp_path / "a.gguf"))).encode("Old times.") == load_tokenizer(folder).encode(
        "Old times."
    )
