"""Parts of models from files and options of every weight format: their logits, and what each part holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput, ModelError
from cospec.models import weight_cache
from cospec.models.loading import LoadOptions, check_division, load_model, load_stage
from cospec.models.shard import Shard
from cospec.models.weight_cache import WeightCache
from cospec.native import library
from harness.gguf_files import write_model
from harness.gguf_models import MODELS, PROMPT, random_model
from harness.quantized_checkpoints import write_quantized
from harness.shards import PAGES, ShardsHere, differ

CPU = LoadOptions(device="cpu", num_pages=PAGES)
MIXED = {"attn_v": "Q4_0", "ffn_down": "F16", "token_embd": "Q4_1"}
LAYERS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    model.pages.allocate("a", len(PROMPT))
    found: torch.Tensor = model.forward(TokenBatch((SequenceSlice("a", 0, PROMPT),)))
    return found


def llama(tied: bool = False, **shape: Any) -> Any:
    return random_model(transformers.LlamaConfig(**SHAPE | shape, tie_word_embeddings=tied))


def linears(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.weight for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}


def gguf(folder: Path, tied: bool = False) -> Path:
    return write_model(folder / "m.gguf", llama(tied), "Q8_0", kinds=MIXED)


def converted(folder: Path) -> Path:
    """A file of types whose blocks become blocks of other types."""
    model = llama(hidden_size=256, intermediate_size=512)
    return write_model(folder / "m.gguf", model, "Q3_K", kinds={"attn_v": "IQ4_XS", "attn_output": "IQ4_XS"})


def integers(folder: Path) -> Path:
    """A checkpoint of compressed-tensors with 8 bits; the output layer stays floats."""
    model = llama()
    model.config.save_pretrained(folder)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    packing = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"all": {}}}
    packing["config_groups"] = {"all": {"weights": weights, "targets": ["Linear"]}}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": packing}))
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name, weight in linears(model).items():
        if name != "lm_head":
            groups = weight.unflatten(1, (-1, 32))
            scale = groups.abs().amax(-1, keepdim=True) / 127
            state[f"{name}.weight"] = (groups / scale).round().to(torch.int8).flatten(1)
            state[f"{name}.weight_scale"] = scale.flatten(1)
    save_file(state, folder / "model.safetensors")
    return folder


def act_order(folder: Path) -> Path:
    """A checkpoint of GPTQ with 4 bits, whose blocks hold the inputs in another order."""
    llama().save_pretrained(folder / "floats")
    (folder / "gptq").mkdir()
    write_quantized(folder / "floats", folder / "gptq", "gptq")
    return folder / "gptq"


def adapter(folder: Path, tied: bool = False) -> Path:
    """A model with low-rank updates of all linear layers, the output layer included."""
    model = llama(tied)
    model.save_pretrained(folder / "base")
    (folder / "lora").mkdir()
    factors = {}
    for name, weight in linears(model).items():
        factors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(3, weight.shape[1]) * 0.2
        factors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(weight.shape[0], 3) * 0.2
    save_file(factors, folder / "lora" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "../base", "lora_alpha": 6, "r": 3}
    (folder / "lora" / "adapter_config.json").write_text(json.dumps(config))
    return folder / "lora"


WRITE: dict[str, Callable[[Path], Path]] = {
    "gguf": gguf,
    "gguf-converted": converted,
    "gguf-tied": lambda folder: gguf(folder, tied=True),
    "int-quantized": integers,
    "act-order": act_order,
    "lora": adapter,
    "lora-tied": lambda folder: adapter(folder, tied=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_a_gguf_file_give_the_bits_of_the_whole_model(tmp_path: Path, name: str) -> None:
    config, values = MODELS[name]
    path = write_model(tmp_path / "m.gguf", random_model(config), "Q8_0", **values)
    assert torch.equal(logits(ShardsHere(path, LAYERS)), logits(load_model(str(path), CPU)))


@pytest.mark.parametrize("fused", ["auto", "never"])
@pytest.mark.parametrize("how", WRITE)
def test_stages_give_the_bits_of_the_whole_model(tmp_path: Path, how: str, fused: Any) -> None:
    path, options = WRITE[how](tmp_path), replace(CPU, fused=fused)
    wanted = logits(load_model(str(path), options))
    for stages in (2, 3):
        assert torch.equal(logits(ShardsHere(path, stages, options=options)), wanted)


@pytest.mark.parametrize("quantization", ["q4_0", "q8_0", "int8", "q4_k"])
@pytest.mark.parametrize("how", ["gguf", "lora"])
def test_stages_quantize_as_the_whole_model(tmp_path: Path, how: str, quantization: str) -> None:
    path, options = WRITE[how](tmp_path), replace(CPU, quantization=quantization)
    plain, wanted = logits(load_model(str(path), CPU)), logits(load_model(str(path), options))
    assert torch.equal(logits(ShardsHere(path, 2, options=options)), wanted)
    assert differ(plain, wanted), "the quantization changes the model"


@pytest.mark.parametrize("quantization", [None, "q8_0"])
@pytest.mark.parametrize("how", [how for how in WRITE if how != "act-order"])
def test_shards_sum_to_the_whole_model(tmp_path: Path, how: str, quantization: str | None) -> None:
    """Sums in another order have other last bits, and inputs of later blocks may be rounded to a neighbour."""
    path, options = WRITE[how](tmp_path), replace(CPU, quantization=quantization)
    check_division(str(path), replace(CPU, quantization=quantization, shard=Shard(stages=2, ranks=2)))
    wanted = logits(load_model(str(path), options))
    assert float((logits(ShardsHere(path, 2, 2, options)) - wanted).abs().max()) < 0.02 * float(wanted.abs().max())


def test_the_first_shard_alone_logs_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = replace(CPU, fused="never")
    with caplog.at_level("INFO", "cospec.models.loading"):
        logits(ShardsHere(gguf(tmp_path), 2, 2, options))
    assert [each.getMessage() for each in caplog.records if "transformers' layers" in each.getMessage()] == [
        f"{tmp_path / 'm.gguf'} runs in transformers' layers, because the model is loaded with fused 'never'."
    ]


@pytest.mark.parametrize("rows", [SHAPE["hidden_size"] + 1, SHAPE["hidden_size"] + 2])
def test_an_update_of_another_size_fits_no_shard(tmp_path: Path, rows: int) -> None:
    llama().save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "../base", "lora_alpha": 2, "r": 2}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = {f"{module}A.weight": torch.ones(2, SHAPE["hidden_size"]), f"{module}B.weight": torch.ones(rows, 2)}
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    for shard in (Shard(), Shard(ranks=2)):
        with pytest.raises(ModelError, match="has an update"):
            load_stage(str(tmp_path / "adapter"), replace(CPU, shard=shard))


def test_shards_of_an_act_order_need_another_format(tmp_path: Path) -> None:
    path = act_order(tmp_path)
    with pytest.raises(InvalidInput, match=r"tensor_parallel_size is 2; allowed is 1, as the blocks of .*act-order"):
        check_division(str(path), replace(CPU, shard=Shard(ranks=2)))
    options = replace(CPU, quantization="q8_0")
    check_division(str(path), replace(options, shard=Shard(ranks=2)))
    wanted = logits(load_model(str(path), options))
    assert float((logits(ShardsHere(path, 1, 2, options)) - wanted).abs().max()) < 0.02 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("kind", "quantization", "said"),
    [
        ("Q8_0", None, "tensor_parallel_size is 4; allowed is a divisor of 2, the blocks of q8_0 in a row of"),
        ("Q8_0", "int8", "tensor_parallel_size is 4; allowed is a divisor of 1, the blocks of int8 in a row of"),
        ("F32", "q4_0", "tensor_parallel_size is 4; allowed is a divisor of 2, the blocks of q4_0 in a row of"),
    ],
)
def test_blocks_that_do_not_divide_are_one_sentence(
    tmp_path: Path, kind: str, quantization: str | None, said: str
) -> None:
    config = transformers.LlamaConfig(**SHAPE | {"num_key_value_heads": 4})
    path = write_model(tmp_path / "m.gguf", random_model(config), kind)
    with pytest.raises(InvalidInput, match=said):
        check_division(str(path), replace(CPU, quantization=quantization, shard=Shard(ranks=4)))


def test_a_stage_reads_its_own_layers_alone(tmp_path: Path) -> None:
    """The control: without its last layer the file has no last stage."""
    file = integers(tmp_path) / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("model.layers.2.")}
    save_file(kept, file)
    for stage in range(2):
        load_stage(str(tmp_path), replace(CPU, shard=Shard(stage, LAYERS)))
    with pytest.raises(ModelError, match="lack"):
        load_stage(str(tmp_path), replace(CPU, shard=Shard(2, LAYERS)))


@pytest.mark.skipif(not library.available(), reason=library.why_not())
def test_stages_pack_the_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding belongs to the first stage, and the output layer to the last."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = random_model(transformers.LlamaConfig(**SHAPE | {"vocab_size": 2048}))
    path, sizes = write_model(tmp_path / "m.gguf", model, "Q8_0", kinds=MIXED), []
    for stages in (1, LAYERS):
        for stage in range(stages):
            load_stage(str(path), replace(CPU, weight_cache=WeightCache(1 << 30), shard=Shard(stage, stages)))
        sizes.append(sum(file.stat().st_size for file in weight_cache.folder().iterdir()))
    whole, parts = sizes[0], sizes[1] - sizes[0]
    assert whole <= parts < whole + 20_000
