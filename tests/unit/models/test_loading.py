"""Finding, checking and loading models; one sentence says what cannot be loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cospec.assembly.drafters import same_tokens
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import CospecError, ModelError
from cospec.models import hf
from cospec.models import model_folder as folders
from cospec.models.attention.sdpa import SDPA
from cospec.models.block_manager import BlockPool
from cospec.models.hf_loading import eos_ids
from cospec.models.kv_cache import KVCache
from cospec.models.loading import LoadOptions, load_model, load_tokenizer, memory_plan, resolve
from cospec.native import operators
from harness.tiny import in_bfloat16

PROMPT = (5, 9, 2, 40, 7, 3, 11)
DEFAULT = LoadOptions()
BY_HF = LoadOptions(fused="never")
EXACT = LoadOptions(device="cpu", kv_cache_dtype="float32")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**options, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms, which start as ones
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny().save_pretrained(tmp_path)
    return tmp_path


def run(model: Any, prompt: tuple[int, ...] = PROMPT) -> torch.Tensor:
    assert model.pages.allocate("a", len(prompt))
    logits: torch.Tensor = model.forward(TokenBatch((SequenceSlice("a", 0, prompt),)))
    return logits


@torch.no_grad()
def plain(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    return logits


def sentence(name: str, options: LoadOptions = DEFAULT) -> str:
    """The error of loading ``name``: one line, one sentence."""
    with pytest.raises(CospecError) as caught:
        load_model(name, options)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


def test_saved_model_runs_as_the_plain_one(saved: Path) -> None:
    model = load_model(str(saved), BY_HF)
    assert (model.vocab_size, model.max_len, model.dtype) == (64, 96, torch.float32)
    torch.testing.assert_close(run(model), plain(tiny()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("linear", ["torch", "mkldnn", "native"])
def test_bfloat16_file_keeps_its_weights_and_sums_in_float32(tmp_path: Path, linear: str) -> None:
    if linear == "native" and not operators.available():
        pytest.skip(operators.why_not())
    tiny().bfloat16().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), replace(EXACT, fused="never", linear_backend=linear))
    wanted = plain(in_bfloat16(tiny()))
    torch.testing.assert_close(run(model), wanted, atol=1e-4, rtol=0)


def test_bfloat16_on_request_rounds_a_float32_file(saved: Path) -> None:
    model = load_model(str(saved), replace(EXACT, fused="never", dtype="bfloat16"))
    found, wanted = run(model), plain(in_bfloat16(tiny()))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    assert float((found - plain(tiny())).abs().max()) > 1e-3


def test_int8_changes_the_model_a_little(saved: Path) -> None:
    found = run(load_model(str(saved), replace(BY_HF, quantization="int8")))
    difference = float((found - plain(tiny())).abs().max())
    assert 1e-3 < difference < 0.5 * float(found.std())


def test_sharded_weights_load_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    torch.testing.assert_close(run(load_model(str(tmp_path), BY_HF)), plain(tiny()), atol=1e-4, rtol=0)
    shards[1].unlink()
    assert shards[1].name in sentence(str(tmp_path))


def test_unknown_folder(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert sentence(str(missing)).startswith(f"model is '{missing}'")


def test_unknown_zoo_member_lists_the_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for member in ("target", "drafter"):
        (tmp_path / member).mkdir()
        (tmp_path / member / "config.json").write_text("{}")
    monkeypatch.setattr(folders, "ZOO", tmp_path)
    assert "the zoo has zoo:drafter, zoo:target" in sentence("zoo:missing")
    assert resolve("zoo") == tmp_path / "target"
    assert resolve("zoo:drafter") == tmp_path / "drafter"


def test_hub_name_without_a_network() -> None:
    text = sentence("no-owner/nothing-of-this-name")
    assert text.startswith("model is 'no-owner/nothing-of-this-name'")


def test_folder_without_a_configuration(tmp_path: Path) -> None:
    assert "has no readable config.json" in sentence(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_configuration_that_is_no_object(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    assert "does not hold a JSON object" in sentence(str(saved))


def test_pickled_weights_are_refused(saved: Path) -> None:
    os.rename(saved / "model.safetensors", saved / "pytorch_model.bin")
    assert "format that can run code" in sentence(str(saved))
    (saved / "pytorch_model.bin").unlink()
    assert "has no weights" in sentence(str(saved))


@pytest.mark.parametrize("content", [b"", b"not a header at all", None])
def test_corrupt_weights(saved: Path, content: bytes | None) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    assert f"The weights {path} cannot be read as safetensors" in sentence(str(saved))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("options", [DEFAULT, BY_HF])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(tmp_path: Path, options: LoadOptions, value: float) -> None:
    model = tiny()
    model.lm_head.weight.data.fill_(value)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="logits that are not numbers"):
        load_model(str(tmp_path), options)


def test_weights_of_another_architecture(saved: Path) -> None:
    change_config(saved, num_hidden_layers=3)
    assert "lack 9 tensors" in sentence(str(saved))


def test_weights_of_other_sizes(saved: Path) -> None:
    change_config(saved, intermediate_size=64)
    assert "cannot be loaded" in sentence(str(saved))


def test_code_of_the_model_is_never_run(saved: Path) -> None:
    change_config(saved, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (saved / "own.py").write_text("raise SystemExit('the code was run')")
    assert "cannot be used" in sentence(str(saved))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "gptq, 3 bits"),
        ({"quantization_config": {"quant_method": "awq", "w_bit": 4, "version": "gemv"}}, "awq, 4 bits, gemv"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes, 8 bits"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
        ({"quantization_config": {"bits": 3}}, "an unnamed method, 3 bits"),
    ],
)
def test_quantized_files_are_refused_by_their_kind(saved: Path, changes: dict[str, Any], kind: str) -> None:
    change_config(saved, **changes)
    assert f"is stored quantized ({kind})" in sentence(str(saved))


def test_a_quantization_in_a_separate_file_is_refused_too(saved: Path) -> None:
    (saved / "hf_quant_config.json").write_text('{"bits": 4}')
    assert "is stored quantized (modelopt, 4 bits)" in sentence(str(saved))


def test_a_quantization_without_its_tensors_is_refused(saved: Path) -> None:
    change_config(saved, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "no qweight exists" in sentence(str(saved))


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a\\b.safetensors", "..", "", 7])
def test_an_index_that_leads_out_of_the_folder_is_refused(saved: Path, name: object) -> None:
    other = saved.parent / "other"
    other.mkdir(exist_ok=True)
    os.rename(saved / "model.safetensors", other / "model.safetensors")
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert sentence(str(saved)).startswith(f"The index {index} names {name!r}")


def test_a_configuration_that_names_its_weights_is_refused(saved: Path) -> None:
    change_config(saved, transformers_weights="../other/model.safetensors")
    assert "sets the location of its weights ('../other/model.safetensors')" in sentence(str(saved))


def test_length_is_bounded_by_the_positions(saved: Path) -> None:
    assert load_model(str(saved), replace(BY_HF, max_model_len=50)).max_len == 50
    assert "max_model_len is 97" in sentence(str(saved), LoadOptions(max_model_len=97))


def test_cache_budget(saved: Path) -> None:
    page = 2 * 2 * 2 * 8 * 16 * 4  # layers, keys and values, heads, dim, entries, bytes
    model = load_model(str(saved), replace(BY_HF, cache_bytes=3 * page + 5))
    assert (model.pages.capacity, model.max_len) == (48, 48)
    assert load_model(str(saved), replace(BY_HF, max_num_seqs=2)).pages.capacity == 2 * 96
    text = sentence(str(saved), LoadOptions(cache_bytes=3 * page, max_model_len=96))
    assert text.startswith(f"kv_cache_memory_bytes is {3 * page}") and f"{6 * page}" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LoadOptions(device="tpu"), "device is 'tpu'"),
        (LoadOptions(dtype="int4"), "dtype is 'int4'"),
        (LoadOptions(quantization="int3"), "quantization is 'int3'"),
        (LoadOptions(linear_backend="own"), "linear_backend is 'own'"),
        (LoadOptions(attention_backend="own", fused="never"), "attention_backend is 'own'"),
    ],
)
def test_unusable_options(saved: Path, options: LoadOptions, words: str) -> None:
    assert words in sentence(str(saved), options)


def test_settings_of_transformers_are_left_alone(saved: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(str(saved), BY_HF)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_loading_prints_nothing(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(str(saved), BY_HF)
    assert capfd.readouterr() == ("", "")


class _Shift(torch.nn.Module):
    """A layer that looks at the row before, as a convolution or a recurrent state would."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x + x.roll(1, dims=1))
        return result


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({"fused": "never"}, "INFO"),
        ({"linear_backend": "torch"}, "INFO"),
        ({"attention_backend": "sdpa"}, "INFO"),
        ({}, None),
    ],
)
@pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")
def test_the_reason_of_the_slow_forward_is_logged(
    saved: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], level: str | None
) -> None:
    with caplog.at_level("INFO", "cospec.models.loading"):
        assert (load_model(str(saved), LoadOptions(**options)).native_forward is None) == (level is not None)
    reason = memory_plan([(str(saved), LoadOptions(**options))]).slow
    said = [(each.levelname, each.getMessage()) for each in caplog.records if each.name == "cospec.models.loading"]
    sentence = f"{saved} runs in transformers' layers, because the model {reason}."
    assert said == ([] if level is None else [(level, sentence)])


def test_layers_that_mix_rows_are_found() -> None:
    model = tiny(attn_implementation=hf.ATTENTION_NAME).requires_grad_(False)
    shapes = hf.probe(model)

    def empty() -> KVCache:
        return KVCache(shapes, BlockPool(4, 8), torch.float32, torch.device("cpu"), by_head=True)

    hf.check_packing(model, empty(), SDPA)
    model.model.layers[0].mlp = _Shift(model.model.layers[0].mlp)
    with pytest.raises(ModelError, match="gives other results in a batch than alone"):
        hf.check_packing(model, empty(), SDPA)


def test_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain_tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    plain_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain_tokenizer).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("b a c") == [1, 0, 2]
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_broken_side_files_are_reported_in_a_sentence(saved: Path, text: str) -> None:
    (saved / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        eos_ids(saved, None)
    (saved / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not"):
        same_tokens(saved, saved)


@pytest.mark.parametrize("fused", ["auto", "never"])
def test_float16_on_request_rounds_the_weights_whoever_runs_them(saved: Path, fused: Any) -> None:
    found = run(load_model(str(saved), replace(EXACT, dtype="float16", fused=fused)))
    rounded = tiny()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.half().float()
    torch.testing.assert_close(found, plain(rounded), atol=1e-4, rtol=0)
    assert float((found - plain(tiny())).abs().max()) > 1e-5


def test_threads_load_tied_models_one_after_the_other(tmp_path: Path) -> None:
    """Transformers ties weights by settings of the process; models that load together would lose tied weights."""
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(lambda _: load_model(str(tmp_path), BY_HF), range(12)))
    found = [run(model) for model in models]
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], plain(tiny(tie_word_embeddings=True)), atol=1e-4, rtol=0)
