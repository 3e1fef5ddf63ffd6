"""Types of GGUF files whose blocks become blocks of other types: their values, and models of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput
from cospec.models.files.gguf_block_conversions import CONVERSIONS
from cospec.models.files.gguf_source import GgufSource
from cospec.models.files.source import EMBEDDING, block_format
from cospec.models.loading import LoadOptions, load_model
from cospec.models.weights.fp32 import Fp32
from cospec.models.weights.q8_0 import Q8_0
from harness.gguf_files import write_model
from harness.gguf_models import COMMON, random_model

SCALES = {"q3_k": 108, "iq4_xs": 0}
"""Places of the float16 scale in a block."""
LOST = 2.0**-11  # fraction of a number that rounding to float16 changes at most
PROMPTS = [tuple((7 * i * i + 3) % 96 for i in range(start, start + 4)) for start in range(0, 64, 4)]


def random_rows(kind: str, largest: float = 1000) -> NDArray[np.uint8]:
    """Rows of blocks of random bytes, with scales from float16's smallest number to ``largest``."""
    generator, shape = np.random.default_rng(0), (5, 1000, 4)  # more than are converted at once
    blocks = generator.integers(0, 256, (*shape, CONVERSIONS[kind].block_bytes), dtype=np.uint8)
    scale = generator.choice([-1, 1], shape) * 2 ** generator.uniform(-24, np.log2(largest), shape)
    place = SCALES[kind]
    blocks[..., place : place + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(5, 1000, -1)


@pytest.mark.parametrize(("kind", "lost"), [("q3_k", 0), ("iq4_xs", LOST)])
def test_blocks_keep_the_values_of_the_gguf_package(kind: str, lost: float) -> None:
    rows, conversion = random_rows(kind), CONVERSIONS[kind]
    wanted = dequantize(rows, GGMLQuantizationType[kind.upper()])
    format = block_format(conversion.format)
    found = format.dequantize(conversion.rows(rows).reshape(-1, format.block_bytes)).reshape(wanted.shape)
    errors = np.abs(found - wanted)
    assert np.all(errors <= lost * np.abs(wanted))
    assert bool(errors.any()) == bool(lost)
    small = np.abs(wanted) < 2.0**-14  # their scales are multiples of float16's smallest number
    assert small.any() and not errors[small].any()


def test_a_scale_beyond_float16_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"scale of iq4_xs is [\d.e+]+; allowed is up to 65504, the largest float16"):
        CONVERSIONS["iq4_xs"].rows(random_rows("iq4_xs", 2**15))
    model = llama()
    model.model.layers[1].self_attn.q_proj.weight.data[3] = 1e7
    source = GgufSource(write_model(tmp_path / "model.gguf", model, "IQ4_XS"))
    name = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(InvalidInput, match=r"blk.1.attn_q.weight of .*model.gguf: scale of iq4_xs is"):
        source.linear(name, Fp32())
    assert float(source.linear(name, Fp32(), convert=True).decode().max()) > 9e6


def llama() -> Any:
    return random_model(transformers.LlamaConfig(**COMMON | {"hidden_size": 256, "intermediate_size": 512}))


MIXTURES: dict[str, tuple[str, dict[str, str]]] = {
    "q3_k": ("Q3_K", {"attn_v": "Q8_0", "ffn_up": "Q6_K"}),
    "iq4_xs": ("IQ4_XS", {"ffn_down": "Q3_K", "token_embd": "Q3_K"}),
}
BYTES = {"f32": 4, "q8_0": 34 / 32, "q6_k": 210 / 256, "q3_k": 210 / 256, "iq4_xs": 18 / 32}
"""Of a weight in memory."""


def mixture(folder: Path, name: str) -> Path:
    kind, kinds = MIXTURES[name]
    return write_model(folder / "model.gguf", llama(), kind, kinds=kinds)


@pytest.mark.parametrize("name", MIXTURES)
def test_tensors_of_a_file_stay_in_blocks_and_read_exactly(tmp_path: Path, name: str) -> None:
    source, model = GgufSource(mixture(tmp_path, name)), llama()
    size = sum(np.prod(tensor.shape) * BYTES[tensor.type] for tensor in source.file.tensors.values())
    assert source.num_bytes(Fp32()) == size
    matrices = {key: value for key, value in model.state_dict().items() if value.dim() > 1}
    assert set(source.kinds) == set(matrices)
    for key, value in matrices.items():
        exact, stored = source.read(key), source.linear(key, Fp32())
        assert float((exact - value).norm() / value.norm()) < 0.2  # the file is that of the model
        assert stored.format.name == source.kinds[key]
        assert bool(((stored.decode() - exact).abs() <= LOST * exact.abs()).all())
        assert stored.format.name == "iq4_nl" or torch.equal(stored.decode(), exact)
    table = source.table()
    assert table is not None and torch.equal(table.decode(), source.linear(EMBEDDING, Fp32()).decode())
    assert source.has_rows(EMBEDDING) and torch.equal(source.row(EMBEDDING, 7), source.read(EMBEDDING)[7])


def rounded_inputs(module: Any, inputs: tuple[Tensor]) -> Tensor:
    return Q8_0().round_inputs(inputs[0])


def wanted_logits(source: GgufSource, rounded: bool, blocks: bool = False) -> Tensor:
    """By transformers on the values of the file or of the blocks, with inputs of products rounded or not."""
    model = llama()
    read = {name: source.read(name) for name in source.shapes}
    if blocks:
        read |= {name: source.linear(name, Fp32()).decode() for name in source.kinds}
    model.load_state_dict(read)
    for module in model.modules():
        if rounded and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded_inputs)
    found: Tensor = model(torch.tensor(PROMPTS), use_cache=False).logits.flatten(0, 1)
    return found


def loss(found: Tensor, wanted: Tensor) -> float:
    """Of the median row: where two computations round one input to different integers, rows of one prompt differ."""
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median())


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("fused", ["auto", "never"])
def test_logits_are_those_of_the_files_values(tmp_path: Path, name: str, fused: Any) -> None:
    """Scales of float16 lose little next to rounded inputs."""
    path = mixture(tmp_path, name)
    options = LoadOptions(device="cpu", fused=fused, kv_cache_dtype="float32")
    source, model = GgufSource(path), load_model(str(path), options)
    ids = [f"p{number}" for number in range(len(PROMPTS))]
    assert all(model.pages.allocate(id, len(prompt)) for id, prompt in zip(ids, PROMPTS, strict=True))
    slices = (SequenceSlice(id, 0, prompt) for id, prompt in zip(ids, PROMPTS, strict=True))
    logits = model.forward(TokenBatch(tuple(slices)))
    assert loss(logits, wanted_logits(source, rounded=True, blocks=True)) < 1e-5
    exact, rounded = wanted_logits(source, rounded=False), wanted_logits(source, rounded=True)
    if name == "q3_k":
        assert loss(logits, rounded) < 1e-5
    assert loss(wanted_logits(source, rounded=False, blocks=True), exact) < 0.1 * loss(rounded, exact)
    assert 0 < loss(logits, exact) < 0.1
