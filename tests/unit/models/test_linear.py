"""Linear back ends: equal products, nothing forgotten, nothing held twice without need."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from cospec.errors import InvalidInput
from cospec.models.linear import LINEAR, TableEmbedding, choose_linear, replace_linears
from cospec.models.weights.bf16 import Bf16
from cospec.models.weights.fp32 import Fp32
from cospec.models.weights.int8 import Int8
from cospec.native import operators
from cospec.registry import WEIGHT_FORMATS

CPU = torch.device("cpu")


class Tiny(nn.Module):
    """A linear layer of each kind, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 24)
        self.first = nn.Linear(24, 40)
        self.block = nn.Sequential(Conv1D(33, 40), nn.GELU(), nn.Linear(33, 24, bias=False))
        self.head = nn.Linear(24, 50, bias=False)
        nn.init.normal_(cast(torch.Tensor, self.block[0].bias))
        self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.block(self.first(self.embed(ids))))
        return result


def need(backend: str) -> None:
    if backend == "native" and not operators.available():
        pytest.skip(operators.why_not())


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 40])
@pytest.mark.parametrize("backend", LINEAR)
def test_products_are_equal(backend: str, rows: int) -> None:
    need(backend)
    plain, swapped = Tiny(), Tiny()
    replace_linears(swapped, backend, Fp32())
    ids = torch.arange(rows)[None] % 50
    torch.testing.assert_close(swapped(ids), plain(ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("backend", LINEAR)
def test_every_linear_layer_is_swapped(backend: str, weights: str) -> None:
    need(backend)
    if (backend, weights) == ("torch", "fp32"):
        return
    model = Tiny()
    replace_linears(model, backend, WEIGHT_FORMATS.load(weights)())
    assert not [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("backend", LINEAR)
def test_formats_mean_the_same_weights_everywhere(backend: str, weights: str) -> None:
    need(backend)
    wanted, found = Tiny(), Tiny()
    for model in (wanted, found):
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    for model, name in ((wanted, "torch"), (found, backend)):
        replace_linears(model, name, WEIGHT_FORMATS.load(weights)())
    ids = torch.arange(9)[None]
    torch.testing.assert_close(found(ids), wanted(ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_threads_pack_every_weight(weights: str, count: int) -> None:
    need("native")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (333, 301), generator=generator).float()
    weight[:, 0] = 127  # scales of int8 are 1
    x = torch.randint(-3, 4, (2, 301), generator=generator).float()
    before = operators.threads()
    operators.set_threads(count)
    try:
        packed = operators.PackedLinear(WEIGHT_FORMATS.load(weights)().read(weight), None)
        assert torch.equal(packed(x), x @ weight.T)  # sums of small integers are exact
    finally:
        operators.set_threads(before)


def test_tied_output_layer_is_shared_where_it_can_be() -> None:
    model = Tiny()
    replace_linears(model, "torch", Fp32())
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_int8_is_within_half_a_step_and_keeps_zero_rows() -> None:
    weight = torch.randn(20, 30)
    weight[3] = 0
    stored = Int8().read(weight)
    integers, scale = stored.parts
    assert integers.dtype is torch.int8
    assert bool(((stored.decode() - weight).abs() <= scale[:, None] * 0.5001).all())
    assert float(stored.decode()[3].abs().max()) == 0


def test_embeddings_take_half_the_memory_with_bf16_weights() -> None:
    model = Tiny()
    replace_linears(model, "torch", Bf16())
    assert isinstance(model.embed, TableEmbedding)
    assert model.embed.weight.dtype is torch.bfloat16


def test_a_table_of_fewer_bits_gives_float_rows() -> None:
    table = torch.randn(10, 4)
    found = TableEmbedding(table, torch.bfloat16)(torch.tensor([[2, 5]]))
    assert found.dtype is torch.float32
    assert torch.equal(found[0], table[[2, 5]].bfloat16().float())


def test_auto_is_the_first_usable() -> None:
    assert choose_linear("auto", CPU) == ("native" if operators.available() else "mkldnn")
    assert choose_linear("torch", CPU) == "torch"
    assert choose_linear("auto", torch.device("cuda")) == "torch"


@pytest.mark.parametrize(("name", "device"), [("cublas", "cpu"), ("mkldnn", "cuda")])
def test_unusable_back_ends_are_refused(name: str, device: str) -> None:
    with pytest.raises(InvalidInput, match=f"linear_backend is '{name}'.*torch on this machine"):
        choose_linear(name, torch.device(device))
