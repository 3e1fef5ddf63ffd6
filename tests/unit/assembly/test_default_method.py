"""Which drafter is meant where a configuration names none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cospec.assembly.build import default_drafter, resolve_speculation
from cospec.assembly.drafters import check_keys, same_tokens
from cospec.config import EngineConfig
from cospec.core.types import SpeculationParams
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.suffix import SuffixDrafter
from cospec.errors import InvalidInput
from cospec.llm import LLM
from cospec.models.lora import base_folder
from cospec.models.model_folder import resolve, zoo_members
from cospec.sampling_params import SamplingParams
from server.fake_engine import write_tokenizer

VOCAB = 257
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "given", "method"),
    [
        ("zoo", None, "draft_model"),
        ("zoo", {}, "draft_model"),
        ("zoo", {"num_speculative_tokens": 3}, "draft_model"),
        ("zoo", {"method": "off"}, "off"),
        ("zoo", {"method": "ngram"}, "ngram"),
        ("zoo:target", None, "draft_model"),
        ("zoo:target-prose", None, "draft_model"),
        ("zoo:target-code", {"num_speculative_tokens": 3}, "draft_model"),
        ("zoo:target-code", {"method": "off"}, "off"),
        ("zoo:drafter", None, "suffix"),
        ("zoo:math", None, "suffix"),
        ("folder", None, "suffix"),
        ("folder", {}, "suffix"),
        ("folder", {"num_speculative_tokens": 3}, "suffix"),
        ("folder", {"method": "off"}, "off"),
        ("folder", {"method": "ngram"}, "ngram"),
        ("folder", {"model": "zoo:drafter"}, "draft_model"),
    ],
)
def test_method(model: str, given: dict[str, Any] | None, method: str) -> None:
    found = resolve_speculation(EngineConfig.build({"model": model, "speculative_config": given}))
    assert found.method == method
    assert found.num_speculative_tokens == (given or {}).get("num_speculative_tokens", "auto")


def test_zoo_targets_share_drafter_and_tokens() -> None:
    """Its targets are the one that is shipped whole and every adapter on it; drafters have no drafter."""
    targets = [member for member in zoo_members() if member.startswith("target")]
    assert {"target", "target-prose", "target-code"} <= set(targets)
    for member in zoo_members():
        drafter = default_drafter(f"zoo:{member}")
        assert drafter == ("zoo:drafter" if member in targets else None)
        if drafter is not None:
            assert same_tokens(base_folder(resolve(f"zoo:{member}")), resolve(drafter))


def test_a_variant_of_the_target_is_drafted_for() -> None:
    with LLM("zoo:target-prose", measure_at_start=False, kv_cache_memory_bytes=1 << 22) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)
        (found,) = llm.generate("It was a dark night, and", params, SpeculationParams(length=4))
    assert found.stats.accepted_by_drafter == {"draft_model": found.stats.accepted}
    assert found.stats.accepted > 0


def test_options_of_no_method_are_not_dropped() -> None:
    config = EngineConfig.build({"model": "folder", "speculative_config": {"prompt_lookup_max": 3}})
    with pytest.raises(InvalidInput, match=r"key speculative_config.prompt_lookup_max is 3.*suffix"):
        check_keys(resolve_speculation(config), SuffixDrafter)


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
    "gemma3-window": lambda: transformers.Gemma3TextConfig(
        **COMMON, head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    ),
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_default_drafter_changes_no_text(kind: str, tmp_path: Path) -> None:
    """Trees and chains of the default drafter change no greedy text and no seeded text, whatever the architecture."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[kind]()).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    prompts = [[5, 6, 7, 8] * 6, [9, 9, 9, 9, 3], [11, 12]]
    params = [
        SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.7, seed=3, ignore_eos=True),
    ]
    texts, drafted = [], []
    for given in (None, {"num_speculative_tokens": 4}, {"method": "off"}):
        options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22, "dtype": "float32", "measure_at_start": False}
        with LLM(str(tmp_path), speculative_config=given, **options) as llm:
            found = llm.generate(prompts, params)
        texts.append([output.outputs[0].token_ids for output in found])
        drafted.append(sum(output.stats.drafted for output in found))
    assert texts[0] == texts[1] == texts[2]
    assert drafted[1] > 0 and drafted[2] == 0


def test_the_error_of_an_unknown_key_lists_common_keys_too() -> None:
    given = {"method": "ngram", "num_speculativ_tokens": 3, "prompt_lookup_max": 4}
    config = resolve_speculation(EngineConfig.build({"speculative_config": given}))
    with pytest.raises(InvalidInput) as caught:
        check_keys(config, NgramDrafter)
    assert str(caught.value).startswith("key speculative_config.num_speculativ_tokens is 3")
    for name in ("num_speculative_tokens", "policy", "prompt_lookup_max"):
        assert f" {name}," in str(caught.value)
