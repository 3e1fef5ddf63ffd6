"""Written GGUF files hold what llama.cpp's converter writes, for which ``harness.gguf_files`` stands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cospec.errors import InvalidInput, ModelError
from cospec.models.files.gguf_file import GgufFile
from cospec.models.files.gguf_writer import write_gguf
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import load_model, load_tokenizer
from cospec.models.model_folder import resolve
from cospec.models.perplexity import perplexity
from harness.gguf_files import write_model
from harness.gguf_models import COMMON, MODELS, random_model

WEIGHTS = "model.safetensors"
SMALL = {name: COMMON[name] for name in COMMON if name != "num_key_value_heads"}


def saved(folder: Path, config: Any) -> Any:
    model = random_model(config)
    model.save_pretrained(folder)
    return model


def write(folder: Path, kind: str = "f32") -> Path:
    path = folder.with_suffix(".gguf")
    write_gguf(path, folder, open_source(folder), kind)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_tensors_and_values_are_the_converter_s(tmp_path: Path, name: str) -> None:
    config, values = MODELS[name]
    model = saved(tmp_path / "own", config)
    own = GgufFile.open(write(tmp_path / "own"))
    other = GgufFile.open(write_model(tmp_path / "other.gguf", model, **values))
    assert own.tensors.keys() == other.tensors.keys()
    for key, tensor in other.tensors.items():
        assert (own.tensors[key].shape, own.tensors[key].type) == (tensor.shape, tensor.type)
        if key.startswith("rope_"):
            np.testing.assert_allclose(own.tensors[key].data.view("<f4"), tensor.data.view("<f4"), rtol=1e-6)
        else:
            np.testing.assert_array_equal(own.tensors[key].data, tensor.data)
    assert {key: own.metadata[key] for key in other.metadata} == other.metadata


def test_experts_of_a_layer_may_be_one_tensor(tmp_path: Path) -> None:
    """transformers saves the experts one by one; its modules, and GGUF files, have all of a layer in one tensor."""
    model = saved(tmp_path / "single", MODELS["qwen3moe"][0])
    (tmp_path / "joined").mkdir()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "joined" / WEIGHTS)
    shutil.copy(tmp_path / "single" / "config.json", tmp_path / "joined")
    assert len(open_source(tmp_path / "single").shapes) > len(open_source(tmp_path / "joined").shapes)
    single, joined = (GgufFile.open(write(tmp_path / name)).tensors for name in ("single", "joined"))
    assert single.keys() == joined.keys()
    assert all(np.array_equal(tensor.data, joined[name].data) for name, tensor in single.items())


@pytest.mark.parametrize("name", ["llama3", "phi3-long", "gemma3", "granite", "qwen3moe"])
def test_a_written_file_can_be_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    saved(tmp_path / "model", MODELS[name][0])
    first = write(tmp_path / "model")
    folder = resolve(str(first))
    write_gguf(tmp_path / "again.gguf", folder, open_source(folder), "f32")
    one, other = GgufFile.open(first).tensors, GgufFile.open(tmp_path / "again.gguf").tensors
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        np.testing.assert_allclose(other[key].data.view("<f4"), tensor.data.view("<f4"), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "down"), [("q4_0", "q4_0"), ("q4_k", "q8_0"), ("bf16", "bf16")])
def test_types_of_tensors(tmp_path: Path, kind: str, down: str) -> None:
    """Rows of 96 are no multiple of the blocks of 256."""
    saved(tmp_path / "model", MODELS["llama"][0])
    tensors = GgufFile.open(write(tmp_path / "model", kind)).tensors
    assert tensors["blk.0.ffn_down.weight"].type == down
    assert tensors["blk.0.attn_norm.weight"].type == "f32"
    assert tensors["token_embd.weight"].type == ("bf16" if kind == "bf16" else "q8_0")


@pytest.mark.parametrize("name", ["phi3-long", "llama-yarn", "llama-linear"])
def test_rotary_parameters_by_their_older_names(tmp_path: Path, name: str) -> None:
    """Checkpoints of transformers 4 have ``rope_scaling`` with ``type``, and early ones the frequencies too."""
    saved(tmp_path / "new", MODELS[name][0])
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    rope = config.pop("rope_parameters")
    rope["type"] = rope.pop("rope_type")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "old" / WEIGHTS)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "old" / WEIGHTS)
    new, old = (GgufFile.open(write(tmp_path / which)) for which in ("new", "old"))
    assert new.metadata == old.metadata and new.tensors.keys() == old.tensors.keys()


def test_phi3_without_a_window_says_so(tmp_path: Path) -> None:
    saved(tmp_path / "model", MODELS["phi3"][0])
    assert GgufFile.open(write(tmp_path / "model")).metadata["phi3.attention.sliding_window"] == 0


def test_routers_stay_float32(tmp_path: Path) -> None:
    saved(tmp_path / "model", MODELS["qwen3moe"][0])
    tensors = GgufFile.open(write(tmp_path / "model", "q8_0")).tensors
    assert tensors["blk.0.ffn_gate_inp.weight"].type == "f32"
    assert tensors["blk.0.ffn_down_exps.weight"].type == "q8_0"


REFUSED: dict[str, tuple[Any, str]] = {
    "type": (transformers.GPTNeoXConfig(**SMALL), "is of type gpt_neox; allowed in a GGUF file are gemma, gemma2"),
    "window": (transformers.MistralConfig(**COMMON, sliding_window=16), "has sliding_window 16, .* allowed is None"),
    "pattern": (
        transformers.Gemma2Config(**COMMON, head_dim=16, query_pre_attn_scalar=16, layer_types=["full_attention"] * 3),
        "has layer_types .* cannot hold",
    ),
    "scale": (
        transformers.Gemma2Config(**COMMON, head_dim=16, query_pre_attn_scalar=8),
        "has query_pre_attn_scalar 8, .* allowed is 16",
    ),
    "activation": (transformers.LlamaConfig(**COMMON, hidden_act="gelu"), "has hidden_act gelu, .* allowed is silu"),
    "rotation": (
        transformers.LlamaConfig(**COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "has rope_parameters.factor 2.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_a_file_cannot_hold(tmp_path: Path, name: str) -> None:
    config, why = REFUSED[name]
    saved(tmp_path / "model", config)
    with pytest.raises(ModelError, match=why):
        write(tmp_path / "model")


def test_unknown_type(tmp_path: Path) -> None:
    saved(tmp_path / "model", MODELS["llama"][0])
    with pytest.raises(InvalidInput, match="q4_9"):
        write(tmp_path / "model", "q4_9")


def test_perplexity_of_a_written_model_is_near(tmp_path: Path) -> None:
    """The perplexity of the zoo's drafter, by hand and in another type; windows do not see each other."""
    folder = resolve("zoo:drafter")
    ids = load_tokenizer(folder).encode("It was a dark and stormy night. The old man went home, and he said that " * 4)
    model = load_model("zoo:drafter")
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses: list[float] = []
    for start in range(0, len(ids) - 1, 16):
        part = ids[start : start + 16]
        with torch.no_grad():
            logits = plain(torch.tensor([part])).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="none").tolist()
        if len(losses) >= 30:
            break
    own = perplexity(model, ids[: start + 16], window=16)
    assert own == pytest.approx(float(np.exp(np.mean(losses))), rel=0.01)
    write_gguf(tmp_path / "a.gguf", folder, open_source(folder), "q8_0")
    after = perplexity(load_model(str(tmp_path / "a.gguf")), ids)
    assert after == pytest.approx(perplexity(model, ids), rel=0.01)
    assert load_tokenizer(resolve(str(tmp_path / "a.gguf"))).encode("Old times.") == load_tokenizer(folder).encode(
        "Old times."
    )
