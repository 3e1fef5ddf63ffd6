"""Architectures that few releases of transformers let run as packed batches: refused by name, or right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import ModelError
from cospec.models.loading import load_model
from harness.tiny import COMMON, VOCAB, tokens

UNUSUAL: dict[str, Callable[[], Any]] = {
    "BloomForCausalLM": lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4),
    "MambaForCausalLM": lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2),
    "FalconForCausalLM": lambda: transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
    "GPTJForCausalLM": lambda: transformers.GPTJConfig(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, rotary_dim=16, n_positions=128, initializer_range=0.15
    ),
    "GPTNeoForCausalLM": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "DeepseekV3ForCausalLM": lambda: transformers.DeepseekV3Config(
        **COMMON, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1
    ),
    "MptForCausalLM": lambda: transformers.MptConfig(vocab_size=VOCAB, d_model=64, n_layers=2, n_heads=4),
    "GptOssForCausalLM": lambda: transformers.GptOssConfig(
        **{**COMMON, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    ),
    "Lfm2ForCausalLM": lambda: transformers.Lfm2Config(**COMMON, layer_types=["conv", "full_attention"]),
    "FalconH1ForCausalLM": lambda: transformers.FalconH1Config(
        **COMMON, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
    ),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, num_layers=1),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_architecture_is_refused_by_name_or_right(name: str, tmp_path: Any) -> None:
    """Newer releases of transformers let more architectures replace their attention; those must then be right."""
    torch.manual_seed(0)
    plain = getattr(transformers, name)(UNUSUAL[name]()).eval()
    plain.save_pretrained(tmp_path)
    try:
        loaded: Any = load_model(str(tmp_path))
    except ModelError as error:
        assert name in str(error)
        assert str(error).endswith(".")
        assert "\n" not in str(error)
        return
    sequences = {"a": tokens(5, seed=1), "b": tokens(9, seed=2)}
    for id, ids in sequences.items():
        assert loaded.pages.allocate(id, len(ids))
    found = loaded.forward(TokenBatch(tuple(SequenceSlice(id, 0, ids) for id, ids in sequences.items())))
    with torch.inference_mode():
        expected = [plain(torch.tensor([ids])).logits[0] for ids in sequences.values()]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-4)
