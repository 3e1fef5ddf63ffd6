"""Blocks of integers: their values are those of GGUF, and a product is the chain of steps that the kernels promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cospec.errors import InvalidInput
from cospec.models.weights.blocks import BlockFormat
from cospec.models.weights.q4_k import Q4K
from cospec.models.weights.q8_0 import Q8_0
from cospec.models.weights.super_blocks import read_parts, split_pairs
from cospec.native import library, operators
from cospec.registry import WEIGHT_FORMATS

NAMES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4")
HALVES = {"q6_k": (208,), "mxfp4": (), "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2)}
native = pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")


def block_format(name: str) -> BlockFormat:
    found = WEIGHT_FORMATS.load(name)()
    assert isinstance(found, BlockFormat)
    return found


def random_blocks(format: BlockFormat, count: int) -> NDArray[np.uint8]:
    """Blocks of random bytes, except for scales of moderate size."""
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (count, format.block_bytes), dtype=np.uint8)
    for place in HALVES.get(format.name, (0,)):
        blocks[:, place : place + 2] = generator.uniform(-1, 1, (count, 1)).astype(np.float16).view(np.uint8)
    if format.name == "mxfp4":
        blocks[:, 0] = generator.integers(100, 140, count)
        blocks[:2, 0] = 0, 1  # the smallest scales
    return blocks


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants")
    format = block_format(name)
    blocks = random_blocks(format, 50)
    wanted = quants.dequantize(blocks, constants.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(format.dequantize(blocks), wanted)


@native
@pytest.mark.parametrize("name", NAMES)
def test_products_of_a_files_blocks_are_products_of_their_values(name: str) -> None:
    format = block_format(name)
    inputs = 2 * format.block_size
    weight = format.from_blocks(random_blocks(format, 80).reshape(40, -1), inputs)
    x = torch.randn(6, inputs, generator=torch.Generator().manual_seed(1))
    values, rounded = weight.decode(torch.float64), format.round_inputs(x).double()
    # A minimum and its integers may cancel, so errors are relative to the largest terms.
    size = rounded.abs().sum(1, keepdim=True) * values.abs().amax(1)
    error = (operators.PackedLinear(weight, None)(x).double() - rounded @ values.T).abs()
    assert bool((error <= 1e-5 * size + 1e-30).all())


@pytest.mark.parametrize("name", NAMES)
def test_reading_rounds_to_near_values(name: str) -> None:
    format = block_format(name)
    weight = torch.randn(30, 500, generator=torch.Generator().manual_seed(2))
    lost = float((format.read(weight).decode() - weight).norm() / weight.norm())
    bits = 8 * format.block_bytes / format.block_size
    assert lost < 2.6 * 2.0**-bits, lost


@native
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("restored_kernels")
def test_blocks_may_hold_the_inputs_in_another_order(name: str) -> None:
    format = block_format(name)
    inputs = 2 * format.block_size
    blocks = torch.from_numpy(random_blocks(format, 80).reshape(40, -1))
    generator = torch.Generator().manual_seed(1)
    order, x = torch.randperm(inputs, generator=generator), torch.randn(64, inputs, generator=generator)
    sorted_weight, weight = format.from_blocks(blocks, inputs), format.from_blocks(blocks, inputs, order)
    assert torch.equal(weight.decode()[:, order], sorted_weight.decode())
    layer, wanted = operators.PackedLinear(weight, None), operators.PackedLinear(sorted_weight, None)(x[:, order])
    for isa in library.offered():
        library.set_isa(isa)
        for threads in (1, 2):
            library.set_threads(threads)
            for rows in (1, 2, 3, 5, 8, 17, 64):
                assert torch.equal(layer(x[:rows]), wanted[:rows]), (isa, threads, rows)
    readable = format.product(x.double(), weight)
    size = x.double().abs().sum(1, keepdim=True) * weight.decode(torch.float64).abs().amax(1)
    assert bool(((wanted.double() - readable).abs() <= 1e-5 * size + 1e-30).all())


def test_only_weights_of_one_order_join() -> None:
    read, order = Q8_0().read(torch.randn(32, 64)), torch.arange(64).roll(1)
    first, same = (Q8_0().from_blocks(read.parts[0], 64, order.clone()) for _ in range(2))
    assert (
        read.joins(read)
        and first.joins(same)
        and torch.equal(first.join([same]).decode(), torch.cat([first.decode()] * 2))
    )
    assert not first.joins(read) and not read.joins(first)
    assert not first.joins(Q8_0().from_blocks(read.parts[0], 64, order.roll(1)))


def test_blocks_of_other_sizes_are_refused() -> None:
    for blocks in (torch.zeros(3, 33, dtype=torch.uint8), torch.zeros(3, 34), torch.zeros(34, dtype=torch.uint8)):
        with pytest.raises(InvalidInput, match=r"blocks of q8_0 is .*; allowed is uint8 \[out, 34\] for 32 inputs"):
            Q8_0().from_blocks(blocks, 32)


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers ``[blocks, 32]`` and scales ``[blocks]`` of one row."""
    blocks = x.reshape(-1, 32)
    largest = blocks.abs().amax(1)
    return (blocks * (127 / largest)[:, None]).round(), largest / 127


def step(total: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A fused multiply-add of float32: products are exact in float64."""
    return (total.double() + first.double() * second.double()).float()


def chain_q8_0(stored: Tensor, x: Tensor, order: slice) -> Tensor:
    """The product of one row as steps over the blocks."""
    blocks = stored.reshape(len(stored), -1, 34)
    scales = blocks[..., :2].contiguous().view(torch.float16).float()[..., 0]
    integers, x_scales = rounded_inputs(x)
    sums = (blocks[..., 2:].view(torch.int8).float() * integers).sum(-1)
    total = torch.zeros(len(stored))
    for b in list(range(blocks.shape[1]))[order]:
        total = step(total, sums[:, b], scales[:, b] * x_scales[b])
    return total


def chain_q4_k(stored: Tensor, x: Tensor) -> Tensor:
    """The product of one row as steps over the parts of all blocks, each followed by the step of its minimum."""
    blocks = stored.reshape(-1, 144).numpy()
    scales, minimums = (torch.from_numpy(part).reshape(len(stored), -1) for part in read_parts(blocks))
    weights = torch.from_numpy(split_pairs(blocks[:, 16:])).reshape(len(stored), -1, 32).float()
    integers, x_scales = rounded_inputs(x)
    sums, x_sums = (weights * integers).sum(-1), x_scales * integers.sum(-1)
    total = torch.zeros(len(stored))
    for b in range(len(x_scales)):
        total = step(total, sums[:, b], scales[:, b] * x_scales[b])
        total = step(total, -minimums[:, b], x_sums[b])
    return total


@native
def test_a_product_is_one_chain_over_the_blocks_in_ascending_order() -> None:
    torch.manual_seed(0)
    weight, x = Q8_0().read(torch.randn(45, 320)), torch.randn(320)
    found = operators.PackedLinear(weight, None)(x)
    assert torch.equal(found, chain_q8_0(weight.parts[0], x, slice(None)))
    descending = chain_q8_0(weight.parts[0], x, slice(None, None, -1))
    assert not torch.equal(found, descending)  # negative control: another order has other bits
    torch.testing.assert_close(found, descending)


@native
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_extreme_integers_saturate_on_no_instruction_set(rows: int) -> None:
    """Sums of two products of unsigned weights, up to ``2 * 255 * 127``, would not fit 16 bits."""
    torch.manual_seed(0)
    blocks = torch.randint(127, 129, (40, 3 * 34), dtype=torch.uint8)  # 127 and -128
    blocks.view(40, 3, 34)[..., :2] = torch.tensor([0, 0x2C], dtype=torch.uint8)  # a scale of 1/16
    weight, x = Q8_0().from_blocks(blocks, 96), torch.randint(0, 2, (rows, 96)).mul(2.0).sub(1)
    weight.parts[0][0].view(3, 34)[:, 2:] = 128  # -128 everywhere
    x[0] = -1
    layer, best = operators.PackedLinear(weight, None), operators.isa()
    try:
        for isa in library.offered():
            operators.set_isa(isa)
            for found, row in zip(layer(x), x, strict=True):
                assert torch.equal(found, chain_q8_0(weight.parts[0], row, slice(None))), isa
    finally:
        operators.set_isa(best)


@native
@pytest.mark.parametrize("name", NAMES)
def test_extreme_sums_are_equal_on_every_instruction_set(name: str) -> None:
    """The largest sums of a block: AVX2 sums integers of up to six bits in 16 bits."""
    format = block_format(name)
    blocks = np.repeat(np.array([0, 255, 127, 128], np.uint8), 10)[:, None].repeat(2 * format.block_bytes, 1)
    for place in HALVES.get(name, (0,)):
        for start in (place, place + format.block_bytes):
            blocks[:, start : start + 2] = np.frombuffer(np.float16(0.25).tobytes(), np.uint8)
    if name == "mxfp4":
        blocks[:, [0, format.block_bytes]] = 128
    weight = format.from_blocks(blocks, 2 * format.block_size)
    layer = operators.PackedLinear(weight, None)
    x = torch.tensor([1.0, -1.0, 0.5]).repeat_interleave(2)[:, None].repeat(1, 2 * format.block_size)
    x[1::2, 1::2] *= -1
    best, found = operators.isa(), []
    try:
        for isa in library.offered():
            operators.set_isa(isa)
            found.append(layer(x))
    finally:
        operators.set_isa(best)
    assert all(torch.equal(each, found[0]) for each in found)
    values = weight.decode(torch.float64)
    size = x.double().abs() @ values.abs().T  # a minimum and its integers may cancel
    assert bool(((found[0].double() - x.double() @ values.T).abs() <= 1e-5 * size).all())


@native
def test_minimums_are_steps_of_the_same_chain() -> None:
    torch.manual_seed(0)
    weight, x = Q4K().read(torch.randn(45, 512)), torch.randn(512)
    assert torch.equal(operators.PackedLinear(weight, None)(x), chain_q4_k(weight.parts[0], x))


@native
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e36, 1e-39, 0.0])
def test_a_row_with_a_strange_input_changes_no_other_row(value: float) -> None:
    torch.manual_seed(0)
    weight, x = Q8_0().read(torch.randn(20, 64)), torch.randn(3, 64)
    layer = operators.PackedLinear(weight, None)
    strange = x.clone()
    strange[1, :32] = value
    found = layer(strange)
    assert torch.equal(found[[0, 2]], layer(x)[[0, 2]])
    assert bool(found[1].isfinite().all()) == (abs(value) < 1e37)
    if found[1].isfinite().all():
        wanted = Q8_0().product(strange[1].double(), weight)
        torch.testing.assert_close(found[1].double(), wanted, rtol=1e-4, atol=1e-5)
