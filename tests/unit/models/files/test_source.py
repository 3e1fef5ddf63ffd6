"""Safetensors of multimodal models: the text model alone runs, in the native forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import ModelError
from cospec.models.files.gguf_writer import write_gguf
from cospec.models.files.source import text_name
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import LoadOptions, load_model, load_stage, memory_plan
from cospec.models.shard import Shard
from cospec.native import library

ADAPTER = "adapter_model.safetensors"
PROMPT = (5, 9, 2, 40, 7, 3, 11, 8, 4, 33, 21, 6, 17)
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96, "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def gemma3(folder: Path, **text: Any) -> Any:
    """Write a random Gemma 3 with a vision tower, in the names of Google's files; ``text`` changes the text model."""
    tokens = {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62, "mm_tokens_per_image": 4}
    config = transformers.Gemma3Config(text_config=TEXT | text, vision_config=VISION, **tokens)
    torch.manual_seed(4)
    model = transformers.Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.15
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def logits_of(folder: Path, fused: Literal["auto", "never"] = "auto") -> tuple[torch.Tensor, bool]:
    """Logits of PROMPT, and whether the native forward computes them."""
    model = load_model(str(folder), LoadOptions(device="cpu", fused=fused))
    assert model.pages.allocate("a", len(PROMPT))
    return model.forward(TokenBatch((SequenceSlice("a", 0, PROMPT),))), model.native_forward is not None


def plain(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    return found


def in_new_names(folder: Path) -> None:
    """Rename the tensors of a file to the names that transformers has in memory."""
    file = folder / "model.safetensors"
    tensors = {key.replace("language_model.model.", "model.language_model."): t for key, t in load_file(file).items()}
    head = {"lm_head.weight": tensors["model.language_model.embed_tokens.weight"].clone()}
    others = {key: tensor for key, tensor in tensors.items() if "language_model" in key}
    save_file(head | others | {f"model.{key}": t for key, t in tensors.items() if key not in others}, file)


@pytest.mark.parametrize("names", ["old", "new"])
@pytest.mark.parametrize("fused", ["auto", "never"])
def test_the_text_model_of_gemma3_equals_transformers(
    tmp_path: Path, names: str, fused: Literal["auto", "never"]
) -> None:
    wanted = plain(gemma3(tmp_path))
    if names == "new":
        in_new_names(tmp_path)
    found, native = logits_of(tmp_path, fused)
    assert native == (library.available() and fused == "auto")
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
    plan = memory_plan([(str(tmp_path), LoadOptions(device="cpu"))])
    assert plan.max_model_len == 96
    assert (plan.slow == "") == library.available()
    assert not any("vision" in name or "projector" in name for name in open_source(tmp_path).shapes)


def test_a_gguf_file_has_the_text_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted = plain(gemma3(tmp_path / "model", layer_types=["sliding_attention"] * 3, query_pre_attn_scalar=8))
    write_gguf(tmp_path / "a.gguf", tmp_path / "model", open_source(tmp_path / "model"), "f32")
    torch.testing.assert_close(logits_of(tmp_path / "a.gguf")[0], wanted, atol=2e-4, rtol=0)


def test_an_adapter_of_gemma3_changes_its_text_model(tmp_path: Path) -> None:
    """An adapter names modules as they are in memory, and may adapt the vision tower too."""
    model, adapter = gemma3(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    before = plain(model)
    factors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            a, b = torch.randn(2, module.in_features) * 0.2, torch.randn(module.out_features, 2) * 0.2
            factors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += b @ a
    assert any("vision_tower" in name for name in factors)
    config = {"peft_type": "LORA", "base_model_name_or_path": "../base", "lora_alpha": 2, "r": 2}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, adapter / "adapter_model.safetensors")
    wanted = plain(model)
    assert float((wanted - before).abs().max()) > 0.1
    torch.testing.assert_close(logits_of(adapter)[0], wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize("stages", [1, 2])
def test_an_adapter_of_the_vision_tower_alone_is_refused(tmp_path: Path, stages: int) -> None:
    model, adapter = gemma3(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    name, *_ = [name for name, _ in model.named_modules() if "vision_tower" in name and name.endswith(".fc1")]
    factors = {"lora_A.weight": torch.ones(2, 16), "lora_B.weight": torch.ones(16, 2)}
    config = {"peft_type": "LORA", "base_model_name_or_path": "../base", "lora_alpha": 2, "r": 2}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"base_model.model.{name}.{key}": factor for key, factor in factors.items()}, adapter / ADAPTER)
    options = LoadOptions(device="cpu", num_pages=8, shard=Shard(stages=stages))
    with pytest.raises(ModelError, match="holds weights of no module that writes text"):
        load_model(str(adapter), options) if stages == 1 else load_stage(str(adapter), options)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        ("vision_tower.encoder.layers.0.mlp.fc1.weight", None),
        ("model.multi_modal_projector.mm_input_projection_weight", None),
    ],
)
def test_names_in_the_text_model(name: str, own: str | None) -> None:
    assert text_name(name) == own
