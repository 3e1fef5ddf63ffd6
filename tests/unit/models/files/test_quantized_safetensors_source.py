"""Quantized safetensors: values against each packing's definition, written out one number at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import ModelError
from cospec.models.files.source import block_format
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import LoadOptions, load_model
from cospec.models.weights.fp32 import Fp32
from cospec.models.weights.q8_0 import Q8_0
from cospec.native import operators
from harness.quantized_checkpoints import Numbers, awq_tensors, gptq_tensors, words

PROMPT = (5, 9, 2, 40, 7, 3, 11)
OUT, IN = 64, 128
LARGEST_SCALE = 4e-3
NAME = "model.layers.0.mlp.up_proj"
Packed = tuple[dict[str, torch.Tensor], NDArray[np.float32]]


def value(integers: Numbers, zeros: Numbers, scales: NDArray[np.float32], groups: Numbers) -> NDArray[np.float32]:
    """``[OUT, IN]``: every weight is its scale times the distance of its integer to the zero point."""
    found = np.zeros((OUT, IN), np.float32)
    for o in range(OUT):
        for i in range(IN):
            found[o, i] = scales[o, groups[i]] * np.float32(integers[o, i] - zeros[o, groups[i]])
    return found


class Drawn:
    """Random integers ``[OUT, IN]``, and zero points and scales ``[OUT, groups]`` with values of float16."""

    def __init__(self, bits: int, size: int, symmetric: bool, ordered: bool = True) -> None:
        random = np.random.default_rng(bits * 1000 + size)
        count = -(-IN // size)
        self.bits = bits
        self.integers: Numbers = random.integers(0, 1 << bits, (OUT, IN))
        self.zeros: Numbers = random.integers(0, 1 << bits, (OUT, count))
        if symmetric:
            self.zeros[:] = 1 << (bits - 1)
        self.scales = random.uniform(1e-3, LARGEST_SCALE, (OUT, count)).astype(np.float16).astype(np.float32)
        self.groups: Numbers = np.arange(IN) // size
        if not ordered:
            self.groups = random.permutation(self.groups)

    @property
    def value(self) -> NDArray[np.float32]:
        return value(self.integers, self.zeros, self.scales, self.groups)

    @property
    def halves(self) -> torch.Tensor:
        return torch.from_numpy(self.scales).half()


def gptq(bits: int = 4, size: int = 32, symmetric: bool = True, ordered: bool = True, version: int = 1) -> Packed:
    drawn = Drawn(bits, size, symmetric, ordered)
    stored = (drawn.zeros - (version == 1)) % (1 << bits)
    return gptq_tensors(drawn.integers, stored, drawn.scales, drawn.groups, bits), drawn.value


def awq(size: int = 64) -> Packed:
    drawn = Drawn(4, size, symmetric=False)
    return awq_tensors(drawn.integers, drawn.zeros, drawn.scales), drawn.value


def packed_integers(bits: int, size: int, symmetric: bool, ordered: bool = True) -> Packed:
    drawn = Drawn(bits, size, symmetric, ordered)
    tensors = {
        "weight_packed": words(drawn.integers, bits),
        "weight_scale": torch.from_numpy(drawn.scales).half(),
        "weight_shape": torch.tensor([OUT, IN]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(drawn.zeros.T, bits).t().contiguous()
    if not ordered:
        tensors["weight_g_idx"] = torch.from_numpy(drawn.groups).int()
    return tensors, drawn.value


def packed_whole(symmetric: bool) -> Packed:
    """One scale and one zero point for the whole tensor. compressed-tensors does not pack such a zero point."""
    drawn = Drawn(4, IN, symmetric)
    drawn.scales[:], drawn.zeros[:] = drawn.scales[0], drawn.zeros[0]
    tensors = {
        "weight_packed": words(drawn.integers, 4),
        "weight_scale": drawn.halves[0],
        "weight_shape": torch.tensor([OUT, IN]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(drawn.zeros[0] - 8).to(torch.int8)
    return tensors, drawn.value


def plain_integers(symmetric: bool, size: int = IN) -> Packed:
    drawn = Drawn(8, size, symmetric)
    tensors = {"weight": torch.from_numpy(drawn.integers - 128).to(torch.int8), "weight_scale": drawn.halves}
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(drawn.zeros - 128).to(torch.int8)
    return tensors, drawn.value


def fp8(scales: NDArray[np.float32], name: str, tile: tuple[int, int] = (OUT, IN)) -> Packed:
    weight = torch.from_numpy(np.random.default_rng(3).normal(0, 1, (OUT, IN)).astype(np.float32))
    stored = weight.to(torch.float8_e4m3fn)
    found = np.zeros((OUT, IN), np.float32)
    for o in range(OUT):
        for i in range(IN):
            scale = scales[o // tile[0], i // tile[1]]
            found[o, i] = np.float32(stored[o, i].float()) * scale
    rounded = torch.from_numpy(found).bfloat16().float().numpy()
    return {"weight": stored, name: torch.from_numpy(scales if scales.size > 1 else scales[0])}, rounded


def compressed(layout: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


TILES = np.array([[0.01, 0.02], [0.03, 0.04]], np.float32)
CASES: dict[str, tuple[Packed, dict[str, Any], str | None]] = {
    "gptq": (gptq(), {"quant_method": "gptq", "bits": 4}, "q4_0"),
    "gptq-v2": (gptq(version=2), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, "q4_0"),
    "gptq-zeros": (gptq(symmetric=False), {"quant_method": "gptq", "bits": 4}, "q4_1"),
    "gptq-act-order": (gptq(ordered=False), {"quant_method": "gptq", "bits": 4}, "q4_0"),
    "gptq-act-order-8": (gptq(8, 64, ordered=False), {"quant_method": "gptq", "bits": 8}, "q8_0"),
    "gptq-act-order-zeros": (gptq(symmetric=False, ordered=False), {"quant_method": "gptq", "bits": 4}, "q4_1"),
    "gptq-act-order-small-groups": (gptq(size=16, ordered=False), {"quant_method": "gptq", "bits": 4}, None),
    "gptq-8": (gptq(8, 64), {"quant_method": "gptq", "bits": 8}, "q8_0"),
    "gptq-8-zeros": (gptq(8, IN, symmetric=False), {"quant_method": "gptq", "bits": 8}, None),
    "gptq-2": (gptq(2, 64), {"quant_method": "gptq", "bits": 2}, "q4_0"),
    "awq": (awq(), {"quant_method": "awq", "bits": 4, "version": "gemm"}, "q4_1"),
    "awq-uneven": (awq(96), {"quant_method": "awq", "bits": 4, "q_group_size": 96}, "q4_1"),
    "packed-4": (packed_integers(4, 32, True), compressed("pack-quantized", 4), "q4_0"),
    "packed-4-zeros": (packed_integers(4, IN, False), compressed("pack-quantized", 4), "q4_1"),
    "packed-4-order": (packed_integers(4, 32, True, ordered=False), compressed("pack-quantized", 4), "q4_0"),
    "packed-8": (packed_integers(8, 64, True), compressed("pack-quantized", 8), "q8_0"),
    "packed-small-groups": (packed_integers(4, 16, True), compressed("pack-quantized", 4), None),
    "packed-4-uneven": (packed_integers(4, 96, False), compressed("pack-quantized", 4, group_size=96), "q4_1"),
    "packed-4-whole": (packed_whole(True), compressed("pack-quantized", 4), "q4_0"),
    "packed-4-whole-zero": (packed_whole(False), compressed("pack-quantized", 4), "q4_1"),
    "int8-uneven": (plain_integers(True, 96), compressed("int-quantized", 8, group_size=96), "q8_0"),
    "int8": (plain_integers(True), compressed("int-quantized", 8), "q8_0"),
    "int8-zeros": (plain_integers(False), compressed("int-quantized", 8), None),
    "fp8": (fp8(np.array([[0.02]], np.float32), "weight_scale"), {"quant_method": "fp8"}, None),
    "fp8-tiles": (
        fp8(TILES, "weight_scale_inv", (OUT // 2, IN // 2)),
        {"quant_method": "fp8", "weight_block_size": [OUT // 2, IN // 2]},
        None,
    ),
    "fp8-uneven-tiles": (
        fp8(TILES, "weight_scale_inv", (48, 96)), {"quant_method": "fp8", "weight_block_size": [48, 96]}, None
    ),
    "fp8-uneven-blocks": (
        fp8(TILES, "weight_scale", (48, 96)), compressed("float-quantized", 8, "float", block_structure="48x96"), None
    ),
    "fp8-uneven-groups": (
        fp8(np.repeat(TILES, OUT // 2, 0), "weight_scale", (1, 96)),
        compressed("float-quantized", 8, "float", group_size=96),
        None,
    ),
    "fp8-outputs": (
        fp8(np.linspace(0.01, 0.02, OUT, dtype=np.float32)[:, None], "weight_scale", (1, IN)),
        compressed("float-quantized", 8, "float"),
        None,
    ),
}  # fmt: skip


def model() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=IN, intermediate_size=OUT, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def write(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    """A model whose up projection is packed; the other layers are floats, as layers that are ignored."""
    plain = model()
    plain.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    state = {name: tensor.contiguous() for name, tensor in plain.state_dict().items() if name != f"{NAME}.weight"}
    save_file(state | {f"{NAME}.{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_values_follow_the_definition(tmp_path: Path, case: str) -> None:
    (tensors, wanted), quantization, kind = CASES[case]
    write(tmp_path, tensors, quantization)
    source = open_source(tmp_path)
    assert source.shapes[f"{NAME}.weight"] == (OUT, IN)
    assert source.kinds.get(f"{NAME}.weight") == kind
    np.testing.assert_array_equal(source.read(f"{NAME}.weight").float().numpy(), wanted)
    stored = source.linear(f"{NAME}.weight", Fp32())
    assert stored.format.name == (kind or "fp32")
    assert (stored.order is not None) == ("order" in case and kind is not None)
    rounding = LARGEST_SCALE * 15 * 2.0**-11 if kind == "q4_1" else 0  # of a minimum to float16
    np.testing.assert_allclose(stored.decode().numpy(), wanted, rtol=0, atol=rounding)
    if kind is not None:
        assert stored.num_bytes == block_format(kind).num_bytes(OUT, IN)


@pytest.mark.parametrize("case", CASES)
def test_a_layer_without_blocks_becomes_floats(tmp_path: Path, case: str) -> None:
    (tensors, _), quantization, kind = CASES[case]
    write(tmp_path, tensors, quantization)
    source, weight = open_source(tmp_path), f"{NAME}.weight"
    assert source.quantized[weight].bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert list(source.quantized) == [weight]
    assert source.expanded(Fp32()) == ([] if kind else [weight])
    assert source.expanded(Fp32(), convert=True) == [weight]
    assert source.expanded(Q8_0(), convert=True) == []


@pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")
def test_layers_that_become_floats_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tensors, _), quantization, _ = CASES["fp8"]
    write(tmp_path, tensors, quantization)
    load_model(str(tmp_path), LoadOptions(device="cpu"))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"Quantized weights of {tmp_path} become floats, which take 2.0 times their bytes: 1 in fp8."
    )


@pytest.mark.parametrize("case", ["gptq", "awq", "packed-4-order", "gptq-act-order-zeros", "fp8"])
@pytest.mark.parametrize("fused", ["auto", "never"])
def test_model_runs_with_the_values(tmp_path: Path, case: str, fused: Any) -> None:
    (tensors, weight), quantization, kind = CASES[case]
    write(tmp_path, tensors, quantization)
    loaded = load_model(str(tmp_path), LoadOptions(fused=fused))
    assert loaded.pages.allocate("a", len(PROMPT))
    found = loaded.forward(TokenBatch((SequenceSlice("a", 0, PROMPT),)))
    plain = model()
    before = plain(torch.tensor([PROMPT]), use_cache=False).logits[0]
    plain.model.layers[0].mlp.up_proj.weight.data = torch.from_numpy(weight)
    wanted = plain(torch.tensor([PROMPT]), use_cache=False).logits[0]
    near = 0.1 if case == "fp8" else 0.02 if kind else 1e-4  # bfloat16; inputs of blocks have 8 bits
    assert float((found - wanted).abs().max()) < near < float((before - wanted).abs().max())


def test_zero_point_of_version_1_is_not_that_of_version_2(tmp_path: Path) -> None:
    """Negative control: the versions differ by one step everywhere."""
    (tensors, wanted), _, _ = CASES["gptq-v2"]
    write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4})
    assert not np.allclose(open_source(tmp_path).read(f"{NAME}.weight").numpy(), wanted)


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq, 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "awq, 4 bits, marlin"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        (compressed("marlin-24", 4), "compressed-tensors, marlin-24"),
        ({"quant_method": "quark"}, "quark"),
    ],
)
def test_other_kinds_are_named(tmp_path: Path, quantization: dict[str, Any], kind: str) -> None:
    write(tmp_path, gptq()[0], quantization)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path))
    assert f"is stored quantized ({kind}); allowed are gptq" in str(caught.value)


def test_tiles_of_transformers_are_the_default(tmp_path: Path) -> None:
    """A configuration without ``weight_block_size`` means tiles of 128 x 128, as in transformers."""
    (tensors, wanted) = fp8(np.array([[0.02]], np.float32), "weight_scale_inv")
    write(tmp_path, tensors, {"quant_method": "fp8"})
    np.testing.assert_array_equal(open_source(tmp_path).read(f"{NAME}.weight").float().numpy(), wanted)


BAD: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "fp8": (
        fp8(TILES, "weight_scale_inv", (48, 96))[0], {"quant_method": "fp8"},
        "weight_scale_inv has shape [2, 2]; allowed is [1], [64] or [1, 1], a scale for each tile of 128 x 128.",
    ),
    "fp8-size": (
        {}, {"quant_method": "fp8", "weight_block_size": [0, "a"]},
        "has weight_block_size [0, 'a']; allowed are two positive integers.",
    ),
    "awq": (
        awq(96)[0], {"quant_method": "awq", "bits": 4, "group_size": 32},
        "scales has shape [2, 64]; allowed is 4 groups of 32 for 128 inputs.",
    ),
    "awq-size": ({}, {"quant_method": "awq", "bits": 4, "group_size": "x"}, "has group_size 'x'; allowed is"),
    "awq-no-size": (
        awq(48)[0], {"quant_method": "awq", "bits": 4},
        "scales has shape [3, 64]; allowed is a number of groups that divides 128 inputs, or group_size",
    ),
    "packed": (
        packed_integers(4, 32, True)[0] | {"weight_scale": torch.ones(3)}, compressed("pack-quantized", 4),
        "weight_scale has shape [3]; allowed is [1], [64] or [64, groups].",
    ),
    "packed-zeros": (
        packed_integers(4, 32, True)[0] | {"weight_zero_point": torch.zeros(OUT, 2, dtype=torch.int8)},
        compressed("pack-quantized", 4),
        "weight_zero_point has shape [64, 2]; allowed is a zero point for each scale of [64, 4].",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, case: str) -> None:
    tensors, quantization, why = BAD[case]
    write(tmp_path, tensors or fp8(TILES, "weight_scale_inv")[0], quantization)
    with pytest.raises(ModelError) as caught:
        open_source(tmp_path).read(f"{NAME}.weight")
    assert why in str(caught.value) and tmp_path.name in str(caught.value)
