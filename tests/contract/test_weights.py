"""Every weight format of the table: the readable product is the native one, joining commutes with reading, bytes are
those of the parts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pytest
import torch
from torch import Tensor

from cospec.errors import InvalidInput
from cospec.models.weights.format import LinearWeights, Rows, WeightFormat, bytes_of, choose_format
from cospec.models.weights.int8 import Int8
from cospec.native import operators
from cospec.registry import WEIGHT_FORMATS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [(1, 1), (33, 7), (64, 16), (70, 129)]
NAMES = WEIGHT_FORMATS.names
every_format = pytest.mark.parametrize("format", [WEIGHT_FORMATS.load(name)() for name in NAMES], ids=NAMES)
native = pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")


def random_weight(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, one of them zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-2, 1, outputs)[:, None]
    weight[outputs // 2] = 0
    return weight


def interleave(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all tensors in turns, then one row of zeros."""
    rows = torch.stack(list(parts), 1).flatten(0, 1)
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(
        one.dtype is two.dtype and torch.equal(one, two) for one, two in zip(first, second, strict=True)
    )


def close(format: WeightFormat, layer: operators.PackedLinear, weight: Tensor) -> bool:
    """Whether native and readable products agree within the rounding of float32 sums."""
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1))
    stored = format.read(weight)
    exact = format.round_inputs(x).double() @ stored.decode(torch.float64).T
    size = format.round_inputs(x).double().abs() @ stored.decode(torch.float64).abs().T
    errors = [(found.double() - exact).abs() for found in (layer(x), format.product(x, stored))]
    return all(bool((error <= 1e-6 * weight.shape[1] ** 0.5 * size + 1e-30).all()) for error in errors)


@native
@every_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_native_product_is_the_readable_product(format: WeightFormat, shape: tuple[int, int]) -> None:
    weight = random_weight(*shape)
    assert close(format, operators.PackedLinear(format.read(weight), None), weight)


@native
def test_a_product_with_another_scale_is_found() -> None:
    """Negative control: a kernel that reads the scale of another output."""

    class Shifted(Int8):
        def pack(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
            integers, scale = parts
            return integers, scale.roll(1)

    weight = random_weight(33, 7)
    assert not close(Int8(), operators.PackedLinear(Shifted().read(weight), None), weight)


@every_format
@pytest.mark.parametrize("rows", [torch.cat, interleave], ids=["cat", "interleave"])
def test_joining_commutes_with_reading(format: WeightFormat, rows: Rows) -> None:
    weights = [random_weight(32, 64, seed) for seed in (1, 2)]
    biases = [weight[:, 0].clone() for weight in weights]
    first, second = (LinearWeights(format.read(weight), bias) for weight, bias in zip(weights, biases, strict=True))
    joined = first.join(second, rows=rows)
    whole = format.read(rows(weights))
    assert torch.equal(joined.weight.decode(), whole.decode())
    assert joined.bias is not None and torch.equal(joined.bias, rows(biases))
    if rows is torch.cat:  # a row of zeros may have other parts of the same value
        assert equal(joined.weight.parts, whole.parts)
    x = torch.randn(3, 64)
    separate = [format.product(x, layer.weight, layer.bias).T for layer in (first, second)]
    torch.testing.assert_close(format.product(x, joined.weight, joined.bias).T, rows(separate), rtol=1e-4, atol=1e-4)


@every_format
def test_a_layer_without_a_bias_leaves_the_joined_layer_without_one(format: WeightFormat) -> None:
    layer = LinearWeights(format.read(random_weight(32, 64)), torch.ones(32))
    assert layer.join(LinearWeights(layer.weight, None)).bias is None


def test_columns_that_are_joined_are_found() -> None:
    """Negative control: joined along the inputs, the scale of an output is another."""
    weights = [random_weight(32, 64, seed) for seed in (1, 2)]
    first, second = (Int8().read(weight) for weight in weights)
    assert not torch.equal(torch.cat([first.decode(), second.decode()], 1), Int8().read(torch.cat(weights, 1)).decode())


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bytes_are_those_of_the_parts(format: WeightFormat, dtype: torch.dtype) -> None:
    shapes = [(64, 32), (32, 128)]
    stored = [format.read(random_weight(*shape).to(dtype)) for shape in shapes]
    for each, shape in zip(stored, shapes, strict=True):
        assert each.num_bytes == format.num_bytes(*shape)
        assert (each.outputs, each.inputs) == shape == tuple(each.decode().shape)
    table = prod((7,)) * format.table_dtype.itemsize
    assert bytes_of(format, [*shapes, (7,)]) == sum(each.num_bytes for each in stored) + table


@every_format
def test_other_shapes_are_refused(format: WeightFormat) -> None:
    for shape in ((3,), (0, 4), (2, 3, 4)):
        with pytest.raises(InvalidInput, match=r"weight is of shape .*; allowed is \[out, in\]"):
            format.read(torch.zeros(shape))


def test_options_choose_the_format() -> None:
    assert choose_format(None, torch.float32, CPU).name == "fp32"
    assert choose_format(None, torch.bfloat16, CPU).name == "bf16"
    for device in (CPU, CUDA):
        assert choose_format(None, torch.float16, device).name == "fp16"
    assert choose_format("int8", torch.bfloat16, CPU).name == "int8"
    assert choose_format("int4", torch.bfloat16, CPU).name == "q4_0"
    for name, device in (("int3", CPU), ("bf16", CPU), ("int8", CUDA)):
        with pytest.raises(
            InvalidInput, match=f"quantization is '{name}'; allowed is on a CPU one of int8, q8_0, .*; otherwise absent"
        ):
            choose_format(name, torch.float32, device)
