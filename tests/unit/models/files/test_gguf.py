"""GGUF files: configuration, weights and names of each architecture, and files that are refused."""

from __future__ import annotations

import re
import struct
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import ModelError
from cospec.models.families import why_not
from cospec.models.files.gguf_file import GgufFile
from cospec.models.files.gguf_source import GgufSource
from cospec.models.files.source import EMBEDDING, is_linear
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import LoadOptions, load_model, memory_plan, resolve
from cospec.models.weights.fp32 import Fp32
from cospec.native import operators
from harness.gguf_files import rewrite, write_model
from harness.gguf_models import COMMON, MODELS, PROMPT, random_model


def logits(path: Path, **options: Any) -> torch.Tensor:
    model = load_model(str(path), LoadOptions(**options))
    assert model.pages.allocate("a", len(PROMPT))
    return model.forward(TokenBatch((SequenceSlice("a", 0, PROMPT),)))


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(path))
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text
    return text


@pytest.mark.parametrize("name", MODELS)
def test_model_from_gguf_equals_transformers(tmp_path: Path, name: str) -> None:
    config, values = MODELS[name]
    model = random_model(config)
    path = write_model(tmp_path / "model.gguf", model, **values)
    wanted = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(logits(path), wanted, atol=2e-4, rtol=0)


def test_order_of_rotated_rows_and_offsets_of_norms_matter(tmp_path: Path) -> None:
    """Negative control: a file without llama.cpp's order of rows is another model."""
    model = random_model(MODELS["llama"][0])
    wanted = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    rows = model.model.layers[0].self_attn.q_proj.weight
    rows.data = rows.data.flip(0)
    other = logits(write_model(tmp_path / "model.gguf", model))
    assert float((other - wanted).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_values_are_those_of_the_blocks(tmp_path: Path, kind: str) -> None:
    model = random_model(MODELS["qwen2"][0])
    source = GgufSource(write_model(tmp_path / "model.gguf", model, kind))
    own = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        wanted = tensor.numpy()
        if tensor.dim() > 1:
            wanted = gguf.quants.dequantize(gguf.quants.quantize(wanted, own), own)
        np.testing.assert_array_equal(source.read(name).float().numpy(), wanted)


@pytest.mark.parametrize("tied", [True, False])
def test_float16_stays_float16_and_changes_no_bit(tmp_path: Path, tied: bool) -> None:
    config = deepcopy(MODELS["qwen2"][0])
    config.tie_word_embeddings = tied
    model = random_model(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.half().float()
    half, whole = (write_model(tmp_path / f"{kind}.gguf", model, kind) for kind in ("F16", "F32"))
    assert torch.equal(logits(half), logits(whole))
    source, matrices = GgufSource(half), [each.numel() for each in model.parameters() if each.dim() > 1]
    assert GgufSource(whole).num_bytes(Fp32()) - source.num_bytes(Fp32()) == 2 * sum(matrices)
    read = source.reader(Fp32(), torch.float32)
    assert read("lm_head", torch.zeros(1).expand(source.shapes[EMBEDDING])).format.name == "fp16"
    assert source.linear(EMBEDDING, Fp32(), convert=True).format.name == "fp32"


MIXED = {"attn_v": "Q8_0", "ffn_down": "F16", "token_embd": "Q8_0"}


@pytest.mark.parametrize(("name", "kinds"), [("llama", {}), ("qwen3", MIXED), ("phi3", MIXED), ("gemma3", MIXED)])
def test_blocks_run_alike_in_both_forwards(tmp_path: Path, name: str, kinds: dict[str, str]) -> None:
    """Products with blocks are those of the readable format, also where the layers of a model have several formats."""
    config, values = MODELS[name]
    path = write_model(tmp_path / "model.gguf", random_model(config), "Q4_0", kinds=kinds, **values)
    readable = logits(path, fused="never", linear_backend="torch", attention_backend="sdpa")
    torch.testing.assert_close(logits(path), readable, atol=1e-3, rtol=0)
    assert float((logits(path, quantization="q8_0") - readable).abs().max()) > 1e-2  # another format, other numbers


def test_gate_and_up_of_different_types_are_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path / "model.gguf", random_model(MODELS["qwen3"][0]), "Q4_0", kinds={"ffn_gate": "Q8_0"})
    assert not load_model(str(path)).native_forward
    floats, record = caplog.records
    assert floats.getMessage().endswith(": 1 in q4_0."), "transformers' embedding is in floats"
    assert (floats.levelname, record.levelname) == ("WARNING", "WARNING")
    slow = memory_plan([(str(path), LoadOptions())]).slow
    assert slow == "has gate and up projections of different weight formats or orders of inputs"
    assert record.getMessage() == f"{path} runs in transformers' layers, because the model {slow}."
    assert memory_plan([(str(path), LoadOptions(quantization="q8_0"))]).slow == ""
    (planned,) = memory_plan([(str(path), LoadOptions())]).weights
    source = GgufSource(path)
    rows, columns = source.shapes["model.embed_tokens.weight"]
    assert planned.bytes - source.num_bytes(Fp32()) == 4 * rows * columns - rows * columns // 32 * 18


def test_memory_counts_blocks(tmp_path: Path) -> None:
    model = random_model(MODELS["llama"][0])
    whole, packed = (GgufSource(write_model(tmp_path / f"{kind}.gguf", model, kind)) for kind in ("F32", "Q4_0"))
    weights = sum(np.prod(shape) for shape in packed.shapes.values() if len(shape) == 2)
    vectors = sum(shape[0] for shape in packed.shapes.values() if len(shape) == 1)
    assert whole.num_bytes(Fp32()) == 4 * (weights + vectors)
    assert packed.num_bytes(Fp32()) == weights // 32 * 18 + 4 * vectors
    assert packed.num_bytes(Fp32(), convert=True) == whole.num_bytes(Fp32())


def test_formats_are_those_in_memory(tmp_path: Path) -> None:
    model = random_model(MODELS["llama"][0])
    kinds = {"attn_v": "Q8_0", "ffn_down": "F16"}
    source = GgufSource(write_model(tmp_path / "model.gguf", model, "Q4_0", kinds=kinds))
    size = source.num_bytes(Fp32())
    bytes = {"q8_0": 3 * 32 * 64 // 32 * 34, "fp16": 3 * 64 * 96 * 2, "fp32": 7 * 64 * 4}
    bytes["q4_0"] = size - sum(bytes.values())
    shares = [f"{name} {bytes[name] / size:.0%}" for name in sorted(bytes, key=lambda name: -bytes[name])]
    assert source.formats(Fp32()) == ", ".join(shares)
    assert source.formats(Fp32(), convert=True) == "fp32"


UNKNOWN = {"attn_v": "TQ2_0", "attn_q": "TQ1_0"}  # types without blocks in memory


@pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")
def test_weights_that_become_floats_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(transformers.LlamaConfig(**COMMON | {"hidden_size": 256, "num_hidden_layers": 2}))
    known = write_model(tmp_path / "known.gguf", model, "Q4_0", kinds={"attn_v": "F16"})
    path = write_model(tmp_path / "model.gguf", model, "Q4_0", kinds=UNKNOWN)
    load_model(str(known), LoadOptions(device="cpu"))
    assert not caplog.records
    load_model(str(path), LoadOptions(device="cpu", quantization="q8_0"))
    assert not caplog.records
    load_model(str(path), LoadOptions(device="cpu"))
    (record,) = caplog.records
    times = 4 * (256 * 256 + 128 * 256) / (256 * 54 + 128 * 66)  # bytes of a row of 256 weights
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"Quantized weights of {path} become floats, which take {times:.1f} times their bytes: 2 in tq1_0, 2 in tq2_0."
    )


@pytest.mark.parametrize("up", ["F32", "BF16", "TQ2_0"])
def test_gate_and_up_projections_of_different_floats(tmp_path: Path, up: str) -> None:
    """The native forward joins both projections, so they have one format or run in transformers' layers."""
    model = random_model(transformers.LlamaConfig(**COMMON | {"hidden_size": 256, "num_hidden_layers": 2}))
    file = write_model(tmp_path / "model.gguf", model, "Q4_0", kinds={"ffn_gate": "F16", "ffn_up": up})
    assert memory_plan([(str(file), LoadOptions(device="cpu", dtype="float32"))]).slow
    batch = TokenBatch((SequenceSlice("a", 0, (5, 9, 2, 40)),))
    logits = []
    for fused in ("auto", "never"):
        loaded = load_model(str(file), LoadOptions(device="cpu", dtype="float32", fused=fused))
        assert loaded.pages.allocate("a", 4) and loaded.native_forward is None
        logits.append(loaded.forward(batch))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({"fused": "never", "quantization": "q8_0"}, {"q8_0": 8.5 / 8, "fp32": 4}),
        ({"linear_backend": "torch", "quantization": "q8_0"}, {"fp32": 4}),
        ({"linear_backend": "torch"}, {"fp32": 4}),
    ],
)
def test_memory_of_transformers_layers_is_counted(
    tmp_path: Path, options: dict[str, Any], formats: dict[str, float]
) -> None:
    """Embeddings are float32 in memory; back ends that are not native hold float32 alone."""
    model = random_model(transformers.LlamaConfig(**COMMON | {"hidden_size": 256, "num_hidden_layers": 2}))
    file = write_model(tmp_path / "model.gguf", model, "Q4_0", kinds={"token_embd": "F16"})
    chosen = LoadOptions(device="cpu", **{"linear_backend": "native", **options})
    source = open_source(resolve(str(file)))
    expected = sum(
        prod(shape) * formats["q8_0" if is_linear(name) and "q8_0" in formats else "fp32"]
        for name, shape in source.shapes.items()
    )
    (planned,) = memory_plan([(str(file), chosen)]).weights
    assert planned.bytes == pytest.approx(expected, rel=0.01)
    assert set(re.findall(r"[a-z]+\d+(?:_\d)?", planned.formats)) == set(formats)


def test_folder_with_one_file_and_choice_between_several(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny-Q8_0.gguf", random_model(MODELS["qwen2"][0]), "Q8_0")
    assert resolve(str(tmp_path)) == resolve(str(tmp_path / "tiny-Q8_0.gguf"))
    write_model(tmp_path / "tiny-F16.gguf", random_model(MODELS["qwen2"][0]), "F16")
    assert "tiny-F16.gguf, tiny-Q8_0.gguf" in refusal(tmp_path)


def test_changed_file_is_described_again(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model(MODELS["qwen2"][0]))
    before = resolve(str(path))
    assert resolve(str(path)) == before
    write_model(path, random_model(MODELS["qwen3"][0]))
    assert '"qwen3"' in (resolve(str(path)) / "config.json").read_text()


def test_split_model_reads_all_parts(tmp_path: Path) -> None:
    writers = []
    for number in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"m-{number:05}-of-00002.gguf", "llama")
        writer.add_tensor(f"blk.{number}.attn_norm.weight", np.full(8, number, np.float32))
        writers.append(writer)
    for writer in writers:
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
    first = tmp_path / "m-00001-of-00002.gguf"
    assert list(GgufFile.open(first).tensors) == ["blk.1.attn_norm.weight", "blk.2.attn_norm.weight"]
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf is missing"):
        GgufFile.open(first)


def test_refused_files(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", random_model(MODELS["llama"][0]))
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    assert "is not complete" in refusal(path)
    path.write_bytes(whole[:90])
    assert "is not a complete GGUF file" in refusal(path)
    path.write_bytes(b"GGUG" + whole[4:])
    assert "is not a GGUF file" in refusal(path)
    path.write_bytes(whole.replace(b"llama", b"slama"))
    assert "has the GGUF architecture slama; allowed are llama" in refusal(path)
    path.write_bytes(whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"))
    assert "has the tensor blk.0.attn_z.weight, which llama does not have" in refusal(path)


def test_unknown_type_of_a_tensor_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key in ("context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{key}")(8)
    writer.add_head_count_kv(8)
    writer.add_block_count(1)
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(8, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.int32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    assert "token_embd.weight" in (text := refusal(tmp_path / "model.gguf")) and "type i32; allowed are f32" in text


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("general.alignment", 0, "its alignment is 0"),
        ("general.alignment", [8], "its alignment is [8]"),
        ("llama.block_count", 0, "declares 0 layers, but has tensors of 3"),
        ("llama.block_count", 2, "declares 2 layers, but has tensors of 3"),
        ("llama.block_count", 1 << 31, "declares 2147483648 layers, but has tensors of 3"),
    ],
)
def test_hostile_numbers_are_refused(tmp_path: Path, key: str, value: Any, why: str) -> None:
    path = write_model(tmp_path / "model.gguf", random_model(MODELS["llama"][0]))
    rewrite(path, tmp_path / "hostile.gguf", {key: value})
    assert why in refusal(tmp_path / "hostile.gguf")


def test_nested_arrays_are_refused(tmp_path: Path) -> None:
    array, path = struct.pack("<IQ", 9, 1), tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<I", 9) + 20_000 * array)
    assert "is not a complete GGUF file" in refusal(path)


def test_heads_that_rotate_further_than_they_reach_are_refused() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 1.0}
    for factor, allowed in ((1.0, True), (0.5, True), (2.0, False), (0.0, False)):
        config = transformers.LlamaConfig(**COMMON, rope_parameters={**rope, "partial_rotary_factor": factor})
        assert ("of 16 numbers of each head" in why_not(config)) != allowed
