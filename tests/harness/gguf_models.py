"""Small models of every architecture of GGUF files, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

PROMPT = (5, 9, 2, 40, 7, 3, 11, 33, 20, 8)
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 64, "attention_factor": 1.1,
}  # fmt: skip
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig(**COMMON), {}),
    "llama-biased": (transformers.LlamaConfig(**COMMON, attention_bias=True, tie_word_embeddings=True), {}),
    "llama3": (transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3), {}),
    "llama-linear": (
        transformers.LlamaConfig(**COMMON, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "llama-yarn": (
        transformers.LlamaConfig(
            **COMMON,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "mistral": (transformers.MistralConfig(**COMMON, sliding_window=None), {}),
    "qwen2": (transformers.Qwen2Config(**COMMON), {}),
    "qwen3": (transformers.Qwen3Config(**COMMON, head_dim=24), {}),
    "qwen3moe": (
        transformers.Qwen3MoeConfig(
            **COMMON | {"head_dim": 16},
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma": (transformers.GemmaConfig(**COMMON, head_dim=16), {}),
    "gemma2": (
        transformers.Gemma2Config(**COMMON, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        {"attention.sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig(**COMMON, **GEMMA),
        {"attention.sliding_window": 4},
    ),
    "phi3": (transformers.Phi3Config(**COMMON, sliding_window=None, pad_token_id=0), {}),
    "phi3-long": (
        transformers.Phi3Config(
            **COMMON, original_max_position_embeddings=64, rope_parameters=LONG, sliding_window=None, pad_token_id=0
        ),
        {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.1},
    ),
    "granite": (
        transformers.GraniteConfig(
            **COMMON, attention_multiplier=0.3, residual_multiplier=0.5, embedding_multiplier=3.0, logits_scaling=2.0
        ),
        {"attention.scale": 0.3, "residual_scale": 0.5, "embedding_scale": 3.0, "logit_scale": 2.0},
    ),
    "smollm3": (transformers.SmolLM3Config(**COMMON | {"num_hidden_layers": 4}, pad_token_id=0), {}),
    "olmo": (transformers.OlmoConfig(**COMMON, clip_qkv=0.5), {"attention.clamp_kqv": 0.5}),
    "olmo2": (transformers.Olmo2Config(**COMMON), {}),
}


def random_model(config: Any) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        scale, start = (0.15, 0.0) if parameter.dim() >= 2 else (0.1, parameter.data)
        parameter.data = torch.randn(parameter.shape) * scale + start
    model.tie_weights()
    return model.requires_grad_(False)
