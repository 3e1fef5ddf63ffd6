"""Low-rank adapters: merged as the layers would add them; one sentence says what cannot be merged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cospec.cli.models import HEAD, members
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import ModelError
from cospec.models import model_folder as folders
from cospec.models.loading import LoadOptions, load_model, load_tokenizer, memory_plan
from cospec.models.lora import base_folder, is_adapter
from harness.gguf_files import write_model
from harness.gguf_models import MODELS, random_model
from harness.tiny import in_bfloat16

PROMPT = (5, 9, 2, 40, 7, 3, 11)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {"peft_type": "LORA", "base_model_name_or_path": "../base", "lora_alpha": 8, "r": 3}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def base(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    return model


def factors(model: Any, rank: int = 3) -> dict[str, torch.Tensor]:
    """Random ``A`` and ``B`` for every linear layer, under the names that PEFT writes."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEAR:
            out, into = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, into, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.1
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def by_layers(model: Any, tensors: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """Logits of PROMPT with ``scale * B (A x)`` added after every adapted layer; its weight does not change."""

    def adapt(a: torch.Tensor, b: torch.Tensor) -> Any:
        return lambda _module, args, output: output + scale * (args[0] @ a.T) @ b.T

    hooks = [
        model.get_submodule(
            name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        ).register_forward_hook(adapt(a, tensors[name.replace("lora_A", "lora_B")]))
        for name, a in tensors.items()
        if "lora_A" in name
    ]
    logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


def run(folder: Path, **options: Any) -> torch.Tensor:
    model = load_model(str(folder), LoadOptions(device="cpu", **options))
    assert model.pages.allocate("a", len(PROMPT))
    return model.forward(TokenBatch((SequenceSlice("a", 0, PROMPT),)))


@pytest.mark.parametrize("fused", ["auto", "never"])
def test_a_merged_adapter_is_the_adapted_model(base: Any, tmp_path: Path, fused: Any) -> None:
    tensors = factors(base)
    adapted = write(tmp_path / "adapter", tensors)
    expected = by_layers(base, tensors, 8 / 3)
    assert torch.allclose(run(adapted, fused=fused), expected, atol=2e-4)
    assert not torch.allclose(run(tmp_path / "base", fused=fused), expected, atol=0.1)


def test_an_adapter_turns_blocks_into_floats(tmp_path: Path) -> None:
    model = random_model(MODELS["llama"][0])
    file = write_model(tmp_path / "base.gguf", model, "Q4_0")
    adapter = write(tmp_path / "a", factors(model), base_model_name_or_path=str(file))
    (planned,) = memory_plan([(str(adapter), LoadOptions(device="cpu"))]).weights
    assert planned.formats == "fp32"
    assert planned.bytes == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert "q4_0" in memory_plan([(str(file), LoadOptions(device="cpu"))]).weights[0].formats


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"use_rslora": True}, 8 / math.sqrt(3)),
        ({"alpha_pattern": {"q_proj": 5, "[a-z]+_proj": 5}}, 5 / 3),
        ({"r": 99}, 8 / 3),  # the rank is what the factors have
    ],
)
def test_the_scale_is_that_of_peft(base: Any, tmp_path: Path, changes: dict[str, Any], scale: float) -> None:
    tensors = factors(base)
    assert torch.allclose(run(write(tmp_path / "a", tensors, **changes)), by_layers(base, tensors, scale), atol=2e-4)


def test_layers_that_hold_their_weights_transposed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "base")
    name = "base_model.model.transformer.h.0.attn.c_attn."
    tensors = {f"{name}lora_A.weight": torch.randn(3, 32), f"{name}lora_B.weight": torch.randn(96, 3) * 0.1}
    adapted = write(tmp_path / "adapter", tensors, fan_in_fan_out=True)
    assert torch.allclose(run(adapted), by_layers(model, tensors, 8 / 3), atol=2e-4)


def test_bfloat16_rounds_the_sum_and_not_its_parts(base: Any, tmp_path: Path) -> None:
    tensors = factors(base)
    adapted = write(tmp_path / "adapter", tensors)
    with torch.no_grad():
        for key, a in tensors.items():
            if "lora_A" in key:
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                base.get_submodule(name).weight += 8 / 3 * tensors[key.replace("lora_A", "lora_B")] @ a
        expected = in_bfloat16(base)(torch.tensor([PROMPT])).logits[0]
    assert torch.allclose(run(adapted, dtype="bfloat16", fused="never", kv_cache_dtype="float32"), expected, atol=2e-4)


def test_an_adapter_is_found_by_its_files(base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = write(tmp_path / "adapter", factors(base))
    assert is_adapter(adapted) and not is_adapter(tmp_path / "base")
    assert base_folder(adapted) == tmp_path / "base" == base_folder(tmp_path / "base")
    monkeypatch.setattr(folders, "ZOO", tmp_path)
    assert folders.zoo_members() == ["adapter", "base"]
    assert folders.resolve("zoo:adapter") == adapted
    rows = {row[0]: dict(zip(HEAD, row, strict=True)) for row in members(tmp_path)}
    assert rows["zoo:adapter"]["width"] == rows["zoo:base"]["width"] == "32"
    assert rows["zoo:adapter"]["parameters"] == rows["zoo:base"]["parameters"]
    # The base may be named as a model is.
    assert base_folder(write(tmp_path / "named", {}, base_model_name_or_path="zoo:base")) == tmp_path / "base"
    with pytest.raises(ModelError, match="an adapter too"):
        base_folder(write(tmp_path / "twice", {}, base_model_name_or_path="../adapter"))


def test_an_adapter_has_its_base_s_tokenizer(base: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, []))).save_pretrained(
        tmp_path / "base"
    )
    assert load_tokenizer(write(tmp_path / "adapter", {})).get_vocab() == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora to True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save to ['lm_head']"),
        ({"bias": "all"}, "bias to 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights to 'pissa'"),
        ({"lora_alpha": "much"}, "not made of numbers"),
        ({"base_model_name_or_path": "../nowhere"}, "base of the adapter"),
        ({"base_model_name_or_path": None}, "base of the adapter"),
    ],
)
def test_adapters_that_cannot_be_merged_are_reported(
    base: Any, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError) as refused:
        run(write(tmp_path / "adapter", factors(base), **changes))
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_weights_that_do_not_fit_are_reported(base: Any, tmp_path: Path) -> None:
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    a, b = torch.ones(3, 32), torch.ones(32, 3)
    for tensors, named in (
        ({layer + "A.weight": torch.ones(3, 31), layer + "B.weight": b}, "update [32, 31]"),
        ({layer + "A.weight": torch.ones(2, 32), layer + "B.weight": b}, "no matrices to join"),
        ({layer + "A.weight": a}, "one factor of two"),
        ({layer.replace("q_", "x_") + "A.weight": a, layer.replace("q_", "x_") + "B.weight": b}, "x_proj"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": a}, "lora_embedding_A"),
        ({}, "no tensors"),
    ):
        with pytest.raises(ModelError) as refused:
            run(write(tmp_path / "adapter", tensors))
        assert named in str(refused.value) and "\n" not in str(refused.value)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        run(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        run(tmp_path / "adapter")
    for text in ("[]", "{", '{"peft_type": "LORA"}'):
        (tmp_path / "adapter" / "adapter_config.json").write_text(text)
        with pytest.raises(ModelError, match="adapter_config"):
            run(tmp_path / "adapter")


def test_the_base_on_disk_stays_as_it_is(base: Any, tmp_path: Path) -> None:
    before = load_file(tmp_path / "base" / "model.safetensors")
    run(write(tmp_path / "adapter", factors(base)))
    after = load_file(tmp_path / "base" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
