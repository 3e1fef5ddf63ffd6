"""What families have by their configurations, against the modules of transformers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from cospec.models.families import (
    FAMILIES,
    experts_in,
    head_dim,
    rope_of,
    ropes,
    rotated_numbers,
    score_scale,
    tensor_shapes,
    window_of,
)
from cospec.models.rotary import ROPE_TYPES, frequencies

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None,
}  # fmt: skip
SLIDES = {"use_sliding_window": True, "sliding_window": 8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in FAMILIES},
    **{f"{kind}, tied": (kind, {"tie_word_embeddings": True}) for kind in FAMILIES},
    **{f"{kind}, untied": (kind, {"tie_word_embeddings": False}) for kind in FAMILIES},
    **{f"{kind}, biases": (kind, {"attention_bias": True}) for kind in FAMILIES},
    **{f"{kind}, all biases": (kind, {"attention_bias": True, "mlp_bias": True}) for kind in ("llama", "granite")},
    **{f"{kind}, heads of 16": (kind, {"head_dim": 16}) for kind in ("llama", "mistral", "qwen3", "gemma2")},
    "mistral, window": ("mistral", {"sliding_window": 8}),
    "phi3, window": ("phi3", {"sliding_window": 8}),
    "qwen2, window": ("qwen2", {**SLIDES, "max_window_layers": 1}),
    "qwen3, window": ("qwen3", {**SLIDES, "max_window_layers": 2}),
    "qwen3_moe, window": ("qwen3_moe", SLIDES),
    "qwen3_moe, some layers": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "smollm3, window": ("smollm3", {**SLIDES, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "smollm3, no window": ("smollm3", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}),
    "smollm3, all rotate": ("smollm3", {"no_rope_layers": [1] * 4}),
    "gemma2, scale": ("gemma2", {"query_pre_attn_scalar": 100}),
    "granite, scale": ("granite", {"attention_multiplier": 0.3}),
}
ORIGINAL = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {"rope_type": "default", "rope_theta": 5e5}),
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.3}),
    "llama3": ("llama", {"rope_type": "llama3", **ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "yarn": ("llama", {"rope_type": "yarn", **ORIGINAL}),
    "yarn, bounds": ("qwen3", {"rope_type": "yarn", **ORIGINAL, "beta_fast": 16, "beta_slow": 2, "truncate": False}),
    "yarn, scale": ("qwen3", {"rope_type": "yarn", **ORIGINAL, "attention_factor": 1.25}),
    "yarn, two multipliers": ("llama", {"rope_type": "yarn", **ORIGINAL, "mscale": 0.7, "mscale_all_dim": 0.4}),
    "longrope": ("llama", {"rope_type": "longrope", **ORIGINAL, **FACTORS}),
    "longrope, scale": ("llama", {"rope_type": "longrope", **ORIGINAL, **FACTORS, "attention_factor": 1.5}),
    "a part of each head": ("phi3", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "a part, which llama ignores": ("llama", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "linear, a part": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 3, "partial_rotary_factor": 0.5}),
}  # fmt: skip


def module(kind: str, options: dict[str, Any]) -> Any:
    """A model of transformers with random weights."""
    size = {"num_experts": 4, "moe_intermediate_size": 16} if kind == "qwen3_moe" else {}
    config = transformers.AutoConfig.for_model(kind, **SHAPE | size | options)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_windows_and_scales(variant: str) -> None:
    model = module(*VARIANTS[variant])
    config, layers = model.config, model.model.layers
    assert tensor_shapes(config) == {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    for number, layer in enumerate(layers):
        attention = layer.self_attn
        assert head_dim(config) == attention.head_dim
        assert score_scale(config) == attention.scaling
        assert experts_in(config, number) == hasattr(layer.mlp, "experts")
        if config.model_type == "smollm3":
            assert (rope_of(config, number) is not None) == bool(attention.use_rope)
        if config.model_type not in ("mistral", "phi3"):  # whose modules ask the configuration in their forward
            assert window_of(config, number) == getattr(attention, "sliding_window", None)


def test_windows_of_some_variants_differ_from_all_tokens() -> None:
    found = {name: [window_of(module(*given).config, layer) for layer in range(4)] for name, given in VARIANTS.items()}
    assert found["qwen2, window"] == [None, 8, 8, 8] and found["smollm3, window"] == [8, None, 8, None]
    assert found["phi3, window"] == found["mistral, window"] == [8] * 4 and found["llama"] == [None] * 4


@pytest.mark.parametrize("case", ROPES)
def test_frequencies(case: str) -> None:
    kind, rope = ROPES[case]
    model = module(kind, {"rope_parameters": rope})
    given = ropes(model.config)[0]
    found, scale = frequencies(given, rotated_numbers(model.config, given), model.config.max_position_embeddings)
    expected = model.model.rotary_emb
    assert torch.equal(found, expected.inv_freq)
    assert scale == expected.attention_scaling


def test_every_type_of_frequencies_is_compared() -> None:
    assert {rope["rope_type"] for _, rope in ROPES.values()} == set(ROPE_TYPES)


def test_frequencies_of_each_type_of_layer() -> None:
    model = module("gemma3_text", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2})
    given = ropes(model.config)
    assert len(given) == 2 and [rope_of(model.config, layer) for layer in range(4)] == [1, 0, 1, 0]
    for rope, kind in zip(given, ("full_attention", "sliding_attention"), strict=True):
        found, _ = frequencies(rope, rotated_numbers(model.config, rope), model.config.max_position_embeddings)
        assert torch.equal(found, getattr(model.model.rotary_emb, f"{kind}_inv_freq"))
