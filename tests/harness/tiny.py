"""Tiny random models of transformers, with weights large enough that mistakes show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB = 101
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 104, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "mistral-window": lambda: transformers.MistralConfig(**COMMON, sliding_window=9),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=32),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=512, initializer_range=0.15,
        bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip


def tiny(name: str, seed: int = 1) -> Any:
    """A model in evaluation mode."""
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()


def tokens(count: int, seed: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def in_bfloat16(model: Any) -> Any:
    """Weights of ``model`` rounded to bfloat16 in place, and from now on what its linear layers read.

    Buffers, such as rotary frequencies, keep their precision.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))
    return model
