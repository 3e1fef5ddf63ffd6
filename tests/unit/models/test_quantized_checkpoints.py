"""Models of GPTQ with act-order and of AWQ: their logits are those of their values, whatever computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import LoadOptions, load_model, memory_plan
from cospec.models.weight_cache import WeightCache, usage
from cospec.models.weights.fp32 import Fp32
from cospec.models.weights.q8_0 import Q8_0
from cospec.native import library
from harness.llamas import VOCAB, write_pair
from harness.quantized_checkpoints import CONFIGS, write_quantized

FORMATS = {"gptq": "q4_0", "gptq-asymmetric": "q4_1", "awq": "q4_1"}
PROMPTS = [tuple((7 * i * i + 3) % VOCAB for i in range(start, start + 4)) for start in range(0, 64, 4)]
native = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")
EXACT = LoadOptions(kv_cache_dtype="float32")
every_kind = pytest.mark.parametrize("kind", CONFIGS)


@dataclass(frozen=True)
class Checkpoint:
    """A folder, and its exact values by the names of the float model in ``plain``."""

    folder: Path
    plain: Path
    values: dict[str, Tensor]

    @property
    def projections(self) -> list[str]:
        return [name for name in self.values if name.endswith("_proj.weight")]

    def blocks(self) -> dict[str, Tensor]:
        """The values of the blocks in memory."""
        source = open_source(self.folder)
        return {name: source.linear(name, Fp32()).decode() for name in self.projections}

    def logits(self, values: Mapping[str, Tensor] = MappingProxyType({}), rounded: bool = False) -> Tensor:
        """By transformers, with other values of some weights, and with inputs rounded in the order of the groups."""
        model = transformers.LlamaForCausalLM.from_pretrained(self.plain).eval()
        model.load_state_dict({**self.values, **values})
        if rounded:
            stored = load_file(self.folder / "model.safetensors")
            for name in self.projections:
                module = name.removesuffix(".weight")
                groups = stored.get(f"{module}.g_idx", torch.zeros(1))
                rounding = partial(rounded_inputs, groups.argsort(stable=True) if len(groups) > 1 else None)
                model.get_submodule(module).register_forward_pre_hook(rounding)
        with torch.no_grad():
            found: Tensor = model(torch.tensor(PROMPTS), use_cache=False).logits.flatten(0, 1)
        return found


def rounded_inputs(order: Tensor | None, module: Any, inputs: tuple[Tensor]) -> Tensor:
    """What a linear layer takes instead of its inputs ``[..., in]``."""
    x = inputs[0]
    if order is None:
        return Q8_0().round_inputs(x)
    found = torch.empty_like(x)
    found[..., order] = Q8_0().round_inputs(x[..., order])
    return found


def checkpoint(folder: Path, kind: str, own_orders: tuple[str, ...] = ()) -> Checkpoint:
    plain, quantized = folder / "plain", folder / "quantized"
    quantized.mkdir(parents=True)
    write_pair(plain, folder / "drafter", layers=2, hidden=64, intermediate=96)
    return Checkpoint(quantized, plain, write_quantized(plain, quantized, kind, own_orders))


def forward(model: Model) -> Tensor:
    """The logits of the prompts as one batch."""
    ids = [f"p{number}" for number in range(len(PROMPTS))]
    for id, prompt in zip(ids, PROMPTS, strict=True):
        assert model.pages.allocate(id, len(prompt))
    return model.forward(
        TokenBatch(tuple(SequenceSlice(*each) for each in zip(ids, [0] * len(ids), PROMPTS, strict=True)))
    )


def forward_in_parts(model: Model, sizes: tuple[int, ...]) -> Tensor:
    """The logits of all prompts as one sequence, fed in parts of these sizes."""
    tokens, found, start = sum(PROMPTS, ()), [], 0
    assert model.pages.allocate("a", len(tokens))
    for size in sizes:
        found.append(model.forward(TokenBatch((SequenceSlice("a", start, tokens[start : start + size]),))))
        start += size
    model.pages.free("a")
    return torch.cat(found)


def loss(found: Tensor, wanted: Tensor) -> float:
    """Of the median row: where two computations round one input to different integers, rows of one prompt differ."""
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median())


@every_kind
@pytest.mark.parametrize("fused", ["auto", "never"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_logits_are_those_of_the_blocks_and_of_rounded_inputs(
    tmp_path: Path, kind: str, fused: Any, backend: str
) -> None:
    found = checkpoint(tmp_path, kind)
    assert {open_source(found.folder).kinds.get(name) for name in found.projections} == {FORMATS[kind]}
    logits = forward(load_model(str(found.folder), replace(EXACT, fused=fused, linear_backend=backend)))
    assert loss(logits, found.logits(found.blocks(), rounded=True)) < 1e-5
    assert loss(logits, found.logits()) < 0.05
    moved = {name: found.values[name].roll(1, 1) for name in found.projections if "gate_proj" in name}
    assert loss(logits, found.logits(moved)) > 0.5  # negative control: inputs in another order


@every_kind
def test_minimums_of_float16_lose_little_next_to_rounded_inputs(tmp_path: Path, kind: str) -> None:
    """Blocks of 8 bits would hold the exact values, with the same rounding of inputs."""
    found = checkpoint(tmp_path, kind)
    wanted, exact = found.logits(), found.logits(rounded=True)
    assert loss(found.logits(found.blocks()), wanted) < 0.1 * loss(exact, wanted)
    assert loss(found.logits(found.blocks(), rounded=True), wanted) < 1.1 * loss(exact, wanted)


@native
@every_kind
@pytest.mark.usefixtures("restored_kernels")
def test_rows_threads_and_instruction_sets_change_no_bit(tmp_path: Path, kind: str) -> None:
    model = load_model(str(checkpoint(tmp_path, kind).folder))
    wanted = forward_in_parts(model, (64,))
    for isa in library.offered():
        library.set_isa(isa)
        for threads, sizes in ((1, (1,) * 64), (2, (64,)), (2, (2, 3, 5, 7, 13, 34)), (3, (1, 31, 32))):
            library.set_threads(threads)
            assert torch.equal(forward_in_parts(model, sizes), wanted), (isa, threads, sizes)


@pytest.mark.parametrize("own", [("gate_proj",), ("k_proj", "up_proj"), ("v_proj",), ("down_proj",)])
def test_projections_of_one_input_may_have_other_orders(tmp_path: Path, own: tuple[str, ...]) -> None:
    found = checkpoint(tmp_path, "gptq", own)
    slow = memory_plan([(str(found.folder), LoadOptions())]).slow
    split = own[-1] in ("gate_proj", "up_proj")
    assert ("has gate and up projections of different weight formats or orders" in slow) == split
    logits = forward(load_model(str(found.folder), EXACT))
    assert loss(logits, found.logits(rounded=True)) < 1e-5
    assert loss(logits, checkpoint(tmp_path / "same", "gptq").logits(rounded=True)) > 1e-3  # negative control


@native
def test_the_weight_cache_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = checkpoint(tmp_path, "gptq")
    wanted = forward(load_model(str(found.folder)))
    options = LoadOptions(weight_cache=WeightCache(1 << 30))
    for _ in range(2):
        assert torch.equal(forward(load_model(str(found.folder), options)), wanted)
        assert usage()[0] == 1


def test_another_quantization_reads_the_values(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, "gptq-asymmetric")
    loaded = load_model(str(found.folder), LoadOptions(quantization="q8_0"))
    assert loss(forward(loaded), found.logits()) < 0.06
