"""Long RoPE turns a whole batch to other frequencies when one sequence grows long, so loading cuts the length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from cospec.errors import InvalidInput
from cospec.models.loading import LoadOptions, load_model, memory_plan

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
        load_model(name, LoadOptions(device="cpu", max_model_len=96))
    assert refused.value.field == "max_model_len"
    assert "96" in str(refused.value) and "48" in str(refused.value)


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
