"""Scaled rotary embeddings: the frequencies of transformers, for sequences of any length in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput
from cospec.models.loading import LoadOptions, load_model, memory_plan
from cospec.native import library

FACTORS: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 48, "factor": 2.0, **FACTORS,
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
CPU = LoadOptions(device="cpu")


def saved(folder: Path, config: Any, **changes: Any) -> str:
    """A random model whose ``config.json`` has other values than the model was made with."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(folder)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_the_length_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str) -> None:
    name = saved(tmp_path, transformers.LlamaConfig(**SHAPE), **{"rope_parameters": None, key: LONG_ROPE})
    assert load_model(name, CPU).max_len == 48
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert name in warned and "48" in warned
    planned = memory_plan([(name, CPU)])
    assert planned.max_model_len == 48 and planned.cut
    with pytest.raises(InvalidInput) as refused:
        load_model(name, LoadOptions(device="cpu", max_model_len=97))
    assert refused.value.field == "max_model_len"
    assert "97" in str(refused.value) and "96" in str(refused.value)


def test_one_kind_of_layer(tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention"]
    shape = transformers.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=4, layer_types=layers)
    name = saved(tmp_path, shape)
    assert memory_plan([(name, CPU)]).max_model_len == 96
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": LONG_ROPE}
    saved(tmp_path, shape, rope_parameters=rope)
    assert memory_plan([(name, CPU)]).max_model_len == 48


def test_phi_3(tmp_path: Path) -> None:
    """The folders of Phi 3 name the original length outside of ``rope_scaling``."""
    shape = transformers.Phi3Config(**SHAPE, original_max_position_embeddings=32)
    rope = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "longrope", **FACTORS}}
    assert load_model(saved(tmp_path, shape, **rope), CPU).max_len == 32


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "longrope": LONG_ROPE,
}  # fmt: skip


def logits(model: Model, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """The logits of sequences in one batch."""
    for number, length in enumerate(lengths):
        assert model.pages.allocate(str(number), length)
    slices = tuple(SequenceSlice(str(number), 0, TOKENS[:length]) for number, length in enumerate(lengths))
    return list(model.forward(TokenBatch(slices)).split(lengths))


TOKENS = tuple(7 * i % 64 for i in range(90))


@pytest.mark.parametrize("fused", ["auto", "never"])
@pytest.mark.parametrize("kind", ROPES)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str, fused: Any) -> None:
    torch.manual_seed(3)
    rope = {"rope_theta": 1e4, **ROPES[kind]}
    name = saved(tmp_path, transformers.LlamaConfig(**SHAPE, initializer_range=0.2), rope_parameters=rope)
    model = load_model(name, LoadOptions(device="cpu", max_model_len=96, fused=fused))
    if library.available():
        assert (model.native_forward is not None) == (fused == "auto"), "the fast forward runs every kind"
    long, short = logits(model, (90, 20))
    plain = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
    with torch.no_grad():
        expected = plain(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(long, expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(short, long[:20], atol=1e-4), "a sequence has the same frequencies in every batch"
    if kind != "dynamic":  # whose frequencies change beyond the model's positions only
        other = saved(tmp_path, plain.config, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
        default = load_model(other, LoadOptions(device="cpu", max_model_len=96, fused=fused))
        assert not torch.allclose(logits(default, (90,))[0], expected, atol=1e-2)
