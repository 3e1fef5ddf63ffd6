"""Stored configurations: the values of transformers, and a warm start that imports no large library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from cospec.models.config_cache import PlainConfig, store_config, stored_config
from cospec.models.families import FAMILIES, multipliers, rope_of, score_scale, tensor_shapes, why_not, window_of
from cospec.models.hf_loading import hf_config, model_config
from cospec.native import library
from harness.gguf_files import write_model
from server.fake_engine import write_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
LARGE = ("transformers", "torch._dynamo", "torch.distributed.tensor", "torch.onnx", "scipy", "sympy")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", [*FAMILIES, "gpt2", "opt"])
def test_values_and_aliases(tmp_path: Path, kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **(SHAPE if kind in FAMILIES else {}))
    config.save_pretrained(tmp_path)
    expected = hf_config("m", tmp_path)
    assert isinstance(model_config("m", tmp_path), transformers.PreTrainedConfig)
    stored = model_config("m", tmp_path)
    assert isinstance(stored, PlainConfig)
    for name in (*expected.to_dict(), *expected.attribute_map, "base_model_tp_plan"):
        if name not in ("dtype", "transformers_version"):
            assert getattr(stored, name) == json.loads(json.dumps(getattr(expected, name))), name
    assert why_not(stored) == why_not(expected)
    if kind in FAMILIES:
        assert tensor_shapes(stored) == tensor_shapes(expected)
        assert (score_scale(stored), multipliers(stored)) == (score_scale(expected), multipliers(expected))
        for layer in range(SHAPE["num_hidden_layers"]):
            assert window_of(stored, layer) == window_of(expected, layer)
            assert rope_of(stored, layer) == rope_of(expected, layer)


def test_a_changed_configuration_is_read_again(tmp_path: Path) -> None:
    transformers.LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    assert model_config("m", tmp_path).vocab_size == 64
    transformers.LlamaConfig(**{**SHAPE, "vocab_size": 65}).save_pretrained(tmp_path)
    assert [model_config("m", tmp_path).vocab_size for _ in range(2)] == [65, 65]


def test_parts_are_not_stored(tmp_path: Path) -> None:
    transformers.LlavaConfig(text_config={"model_type": "llama", **SHAPE}).save_pretrained(tmp_path)
    found = [model_config("m", tmp_path) for _ in range(2)]
    assert all(isinstance(each, transformers.LlavaConfig) for each in found)


def test_a_text_model_that_runs_alone_is_stored(tmp_path: Path) -> None:
    transformers.Gemma3Config(text_config=SHAPE).save_pretrained(tmp_path)
    first, second = (model_config("m", tmp_path) for _ in range(2))
    assert isinstance(first, transformers.Gemma3TextConfig) and isinstance(second, PlainConfig)
    assert first.model_type == second.model_type == "gemma3_text"
    assert first.vocab_size == second.vocab_size == SHAPE["vocab_size"]


def imported(code: str) -> list[str]:
    """Return the large libraries that a new process has after ``code``."""
    code += f"\nimport sys; print([name for name in {(*LARGE, 'torch')!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
    return found


@pytest.mark.skipif(not library.available(), reason=library.why_not())
def test_a_warm_start_imports_little(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SHAPE, max_position_embeddings=64)
    path = write_model(tmp_path / "m.gguf", transformers.LlamaForCausalLM(config).eval(), "Q8_0")
    code = (
        "import cospec.assembly.build\n"
        "from cospec.models.loading import LoadOptions, load_model\n"
        "from cospec.models.weight_cache import WeightCache\n"
        "options = LoadOptions(device='cpu', num_pages=4, weight_cache=WeightCache(1 << 30))\n"
        f"load_model({str(path)!r}, options)"
    )
    assert "transformers" in imported(code)  # completes the configuration
    assert imported(code) == ["torch"]
    assert imported(code.replace("1 << 30", "0")) == ["torch"]  # packs weights


@pytest.mark.skipif(not library.available(), reason=library.why_not())
def test_a_warm_start_of_a_stage_imports_little(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    code = (
        "import cospec.distributed.stage_worker\n"
        "from cospec.models.loading import LoadOptions, check_division, load_stage\n"
        "from cospec.models.shard import Shard\n"
        "from cospec.models.weight_cache import WeightCache\n"
        "part = Shard(1, 2, 0, 2)\n"
        "options = LoadOptions(device='cpu', num_pages=4, weight_cache=WeightCache(1 << 30), shard=part)\n"
        f"check_division({str(tmp_path)!r}, options)\n"
        f"load_stage({str(tmp_path)!r}, options, lambda product: None)"
    )
    assert "transformers" in imported(code)  # completes the configuration
    assert imported(code) == ["torch"]
    assert imported(code.replace("1 << 30", "0")) == ["torch"]  # packs weights


def test_the_api_process_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import cospec.server.run\n"
        "from cospec.models.model_folder import resolve\n"
        "from cospec.models.hf_tokenizer import import_libraries, tokenizer_of\n"
        "import_libraries()\n"
        "tokenizer_of(resolve('zoo'))\n"
        f"tokenizer_of({str(write_tokenizer(tmp_path))!r})"
    )
    assert imported(code) == ["transformers"]


class Computed(transformers.PreTrainedConfig):
    """Computes a value that its JSON lacks, as some architectures do."""

    model_type = "computed"
    num_hidden_layers = property(lambda self: 3)


def test_values_that_a_class_computes_are_not_stored(tmp_path: Path) -> None:
    Computed().save_pretrained(tmp_path)
    store_config(tmp_path, Computed())
    assert stored_config(tmp_path) is None
    store_config(tmp_path, transformers.LlamaConfig(**SHAPE))
    assert stored_config(tmp_path) is not None


def test_values_that_are_no_json_end_no_start(tmp_path: Path) -> None:
    class Odd(transformers.LlamaConfig):
        attribute_map = {"alias": "odd"}  # noqa: RUF012
        odd = object()

    transformers.LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    store_config(tmp_path, Odd(**SHAPE))
    assert stored_config(tmp_path) is None
    assert not list((tmp_path / "cache").rglob("tmp*"))
