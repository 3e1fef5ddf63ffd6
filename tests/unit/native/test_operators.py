"""The compiled kernels against float64 references, and their promise: a row's result depends on that row alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput
from cospec.models.input_batch import pack
from cospec.native import operators
from cospec.native.library import offered
from cospec.registry import WEIGHT_FORMATS
from harness.attention import ATTENTION_SEGMENTS, SCALE, AttentionCase, attention_case, dense_attention

pytestmark = [
    pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels"),
    pytest.mark.usefixtures("restored_kernels"),
]

CPU = torch.device("cpu")
FORMATS = tuple(WEIGHT_FORMATS)


def machines(most: int = 2) -> Iterator[tuple[str, int]]:
    """Every instruction set that this processor has, with 1 to ``most`` threads."""
    best = operators.isa()
    for isa in offered():
        for threads in range(1, most + 1):
            operators.set_isa(isa)
            operators.set_threads(threads)
            yield isa, threads
    operators.set_isa(best)


def packed(weight: Tensor, bias: Tensor | None = None, name: str = "fp32") -> operators.PackedLinear:
    """A layer whose weight has the format ``name``."""
    return operators.PackedLinear(WEIGHT_FORMATS.load(name)().read(weight), bias)


def run(case: AttentionCase, **options: Any) -> Tensor:
    """The kernel on a copy of the pages."""
    pages = case.k_pages.clone(), case.v_pages.clone()
    return operators.attention(case.q, case.k, case.v, *pages, case.batch, SCALE, **options)


@pytest.mark.parametrize("name", ["fp32", "q8_0"])
def test_threads_compute_each_output_once(name: str) -> None:
    """Threads take shares of a product as they become free: two products after one another, of several callers."""
    torch.manual_seed(1)
    wide, x = torch.randn(2080, 512), torch.randn(3, 512)
    layers = [packed(wide, name=name), packed(wide[:1056].neg(), name=name)]
    operators.set_threads(1)
    expected = [layer(x) for layer in layers]
    assert expected[0].abs().min() > 0
    for threads in (1, 2, 3, 5):
        operators.set_threads(threads)
        with ThreadPoolExecutor(3) as callers:
            for results in callers.map(lambda _: [layer(x) for layer in layers], range(60)):
                assert all(map(torch.equal, results, expected)), threads


SHAPES = [(1, 1), (33, 7), (64, 16), (70, 129), (200, 65), (257, 400)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_linear_is_the_product(name: str, outputs: int, inputs: int) -> None:
    torch.manual_seed(outputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    layer, format = packed(weight, bias, name), WEIGHT_FORMATS.load(name)()
    represented = format.read(weight).decode(torch.float64)
    for rows in (1, 2, 5, 13, 40):
        x = torch.randn(rows, inputs)
        expected = format.round_inputs(x).double() @ represented.T + bias.double()
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5 * inputs**0.5)


def other_bits(
    layer: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor, counts: Iterable[int], shift: int = 0
) -> list[int]:
    """Numbers of rows whose product is not that of each row alone, for 96 rows ``x``."""
    places = [((rows * 7 + shift) % (97 - rows), rows) for rows in counts]
    return [rows for at, rows in places if not torch.equal(layer(x[at : at + rows]), expected[at : at + rows])]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 129), (200, 500)])
def test_linear_rows_are_bit_identical_everywhere(name: str, outputs: int, inputs: int) -> None:
    torch.manual_seed(inputs)
    layer = packed(torch.randn(outputs, inputs), torch.randn(outputs), name)
    x = torch.randn(96, inputs)
    alone: dict[bool, Tensor] = {}
    for isa, threads in machines(4):
        own_order = name == "bf16" and isa == "amx_bf16"
        if own_order not in alone:
            alone[own_order] = torch.cat([layer(row[None]) for row in x])
        expected = alone[own_order]
        # The tiles of rows depend on no other size. The emulation of other formats takes ten times as long without
        # vectors.
        few = outputs > 70 or (isa == "base" and name in ("fp32", "bf16", "fp16", "int8"))
        counts = (1, 2, 3, 5, 8, 13, 33, 64) if few else range(1, 65)
        assert not other_bits(layer, x, expected, counts, threads), (isa, threads)


def test_sums_in_another_order_are_found() -> None:
    """Negative control: the product of several rows is the sum of two halves of the inputs."""
    torch.manual_seed(1)
    weight, x = torch.randn(70, 128), torch.randn(96, 128)
    layer, first, second = packed(weight), packed(weight[:, :64]), packed(weight[:, 64:])

    def halves(x: Tensor) -> Tensor:
        found: Tensor = layer(x) if len(x) == 1 else first(x[:, :64]) + second(x[:, 64:])
        return found

    expected = torch.cat([halves(row[None]) for row in x])
    assert other_bits(halves, x, expected, (1, 2, 5)) == [2, 5]


@pytest.mark.parametrize(("outputs", "inputs"), [(70, 129), (257, 400)])
def test_float16_weights_have_the_products_of_their_float32_values(outputs: int, inputs: int) -> None:
    torch.manual_seed(inputs)
    values = torch.randn(outputs, inputs).half()
    values[0, :40] = torch.tensor([2.0**-power for power in range(-15, 25)]).half()  # subnormal ones from 2^-15 on
    x = torch.cat([torch.randn(7, inputs), torch.eye(inputs)[:40]])
    expected = packed(values.float())(x)
    assert (expected[7:, 0] != 0).all()
    for isa, threads in machines(4):
        for rows in (1, 4, 47):
            assert torch.equal(packed(values, name="fp16")(x[:rows]), expected[:rows]), (isa, threads, rows)
    assert not torch.equal(packed(values, name="bf16")(x), expected)


def test_linear_is_one_chain_of_fused_multiply_adds() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(5, 300), torch.randn(300)
    total = torch.zeros(5)
    for k in range(300):  # a float64 product of float32 values is exact, so one rounding follows
        total = (total.double() + weight[:, k].double() * x[k].double()).float()
    assert torch.equal(packed(weight)(x), total)


def test_linear_keeps_leading_dimensions_and_takes_views() -> None:
    layer = packed(torch.randn(6, 8))
    x = torch.randn(3, 8, 4)
    result = layer(x.transpose(1, 2))
    assert result.shape == (3, 4, 6)
    torch.testing.assert_close(result[2, 1], layer(x[2, :, 1].contiguous()), rtol=0, atol=0)
    assert layer(torch.empty(0, 8)).shape == (0, 6)


def test_bf16_products_take_inputs_in_pairs_the_second_first() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(5, 301).bfloat16(), torch.randn(301)
    layer = packed(weight, name="bf16")
    terms = weight.double() * x.bfloat16().double()  # exact in float32 too
    total = torch.zeros(5)
    for first in range(0, 301, 2):
        for k in (first + 1, first):
            if k < 301:
                total = (total.double() + terms[:, k]).float()
    for isa, _ in machines():
        assert torch.equal(layer(x), total) == (isa != "amx_bf16"), isa


@pytest.mark.skipif("amx_bf16" not in offered(), reason="this processor has no amx_bf16")
def test_bf16_products_of_amx_add_the_even_and_the_odd_of_32_inputs() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 301).bfloat16(), torch.randn(35, 301)
    layer = packed(weight, name="bf16")
    terms = weight.float() * x.bfloat16().float()[:, None]  # exact
    total = torch.zeros(35, 40)
    for first in range(0, 301, 32):
        chains = [torch.zeros(35, 40), torch.zeros(35, 40)]
        for k in range(first, min(first + 32, 301)):
            chains[k % 2] = chains[k % 2] + terms[..., k]
        total = total + (chains[0] + chains[1])
    best = operators.isa()
    operators.set_isa("amx_bf16")
    found = layer(x)
    operators.set_isa(best)
    assert torch.equal(found, total)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.3e38, 1e-39, -0.0, 2**-126, 1 + 2**-8, 1 + 3 * 2**-8])
def test_bf16_inputs_are_rounded_to_nearest_even(value: float) -> None:
    x = torch.tensor([[value, 0.0], [1.0, value]])
    wanted = x.bfloat16().float()
    wanted[wanted.abs() < 2**-126] = 0  # subnormal numbers are taken for 0
    layer = packed(torch.eye(2) * 1.0, name="bf16")
    for isa, _ in machines():
        torch.testing.assert_close(layer(x), wanted @ torch.eye(2), rtol=0, atol=0, equal_nan=True, msg=isa)


def test_linear_refuses_what_it_cannot_multiply() -> None:
    layer = packed(torch.randn(4, 8))
    with pytest.raises(InvalidInput, match=r"float32 \[\.\.\., 8\]"):
        layer(torch.randn(2, 7))
    with pytest.raises(InvalidInput, match="float64"):
        layer(torch.randn(2, 8, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="kernel of a weight format is 'int4'"):
        operators.kernel_id("int4")


@pytest.mark.parametrize(
    ("dim", "heads", "page_size"),
    [(32, (4, 2), 16), (64, (2, 2), 8), (24, (6, 1), 24), (8, (3, 3), 16), (256, (2, 1), 16)],
)
@pytest.mark.parametrize(
    "options", [{}, {"window": 9}, {"window": 2}, {"softcap": 5.0}, {"window": 70, "softcap": 2.0}], ids=str
)
def test_attention_is_masked_softmax(dim: int, heads: tuple[int, int], page_size: int, options: dict[str, Any]) -> None:
    case = attention_case(ATTENTION_SEGMENTS, dim, heads, page_size)
    expected = dense_attention(case, **options)
    torch.testing.assert_close(run(case, **options).double(), expected, rtol=1e-5, atol=1e-5)


def test_attention_writes_keys_and_values_in_place() -> None:
    case = attention_case(ATTENTION_SEGMENTS)
    k_pages, v_pages = case.k_pages.clone(), case.v_pages.clone()
    operators.attention(case.q, case.k, case.v, k_pages, v_pages, case.batch, 0.2)
    for row in range(len(case.k)):
        at = int(case.batch.write_at[row])
        page = int(case.batch.tables[case.batch.row_segment[row], at // 16])
        assert torch.equal(k_pages[page, :, at % 16], case.k[row])
        assert torch.equal(v_pages[page, :, at % 16], case.v[row])
    changed = (k_pages != case.k_pages) & ~(k_pages.isnan() & case.k_pages.isnan())
    assert int(changed.sum()) == case.k.numel()


def test_attention_takes_strided_views() -> None:
    case = attention_case(ATTENTION_SEGMENTS)
    joined = torch.cat([case.q, case.k, case.v], dim=1)
    q, k, v = joined.split([4, 2, 2], dim=1)
    pages = case.k_pages.clone(), case.v_pages.clone()
    assert torch.equal(operators.attention(q, k, v, *pages, case.batch, 0.2), run(case))
    by_head = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    pages = case.k_pages.clone(), case.v_pages.clone()
    assert torch.equal(operators.attention(by_head, k, v, *pages, case.batch, 0.2), run(case))


@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 5.0}], ids=str)
def test_attention_rows_are_bit_identical_everywhere(options: dict[str, float]) -> None:
    case = attention_case(ATTENTION_SEGMENTS)
    expected = run(case, **options)
    for isa, threads in machines():
        assert torch.equal(run(case, **options), expected), (isa, threads)
    for page_size in (8, 24, 40):
        assert torch.equal(run(attention_case(ATTENTION_SEGMENTS, page_size=page_size), **options), expected), page_size
    for span, part in zip(case.batch.spans, ATTENTION_SEGMENTS, strict=True):
        alone = run(attention_case((part,)), **options)
        assert torch.equal(alone, expected[span.first : span.first + span.rows]), part.id


def test_a_drafted_chain_attends_like_plain_decoding() -> None:
    together = attention_case((ATTENTION_SEGMENTS[2],))
    pages = together.k_pages.clone(), together.v_pages.clone()
    rows = operators.attention(together.q, together.k, together.v, *pages, together.batch, 0.2)
    table = {"chain": list(together.batch.spans[0].pages)}
    for i in range(4):
        one = pack(TokenBatch((SequenceSlice("chain", 130 + i, (1,)),)), table, 16, CPU)
        step = slice(i, i + 1)
        pages = together.k_pages.clone() if i == 0 else pages[0], together.v_pages.clone() if i == 0 else pages[1]
        alone = operators.attention(together.q[step], together.k[step], together.v[step], *pages, one, 0.2)
        assert torch.equal(alone[0], rows[i])


def test_attention_refuses_pages_it_cannot_read() -> None:
    case = attention_case(ATTENTION_SEGMENTS)
    with pytest.raises(InvalidInput, match="multiples of 8"):
        operators.attention(case.q, case.k, case.v, case.k_pages.double(), case.v_pages.double(), case.batch, 0.2)
    with pytest.raises(InvalidInput, match="multiples of 8"):
        operators.attention(case.q, case.k, case.v, case.k_pages[:, :1], case.v_pages[:, :1], case.batch, 0.2)


def test_rms_norm() -> None:
    x, weight = torch.randn(3, 5, 70), torch.randn(70)
    expected = torch.nn.functional.rms_norm(x.double(), (70,), weight.double(), 1e-5)
    for _ in machines():
        torch.testing.assert_close(operators.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)


def test_threads_of_python_take_turns() -> None:
    operators.set_threads(2)
    layer = packed(torch.randn(300, 200), name="bf16")
    inputs = [torch.randn(3, 200) for _ in range(32)]
    expected = [layer(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(layer, inputs * 4))
    assert all(torch.equal(result, expected[i % 32]) for i, result in enumerate(results))


def test_a_forked_child_gets_threads_of_its_own() -> None:
    operators.set_threads(2)
    layer = packed(torch.randn(300, 200), name="bf16")
    x = torch.randn(3, 200)
    expected = layer(x)
    child = os.fork()
    if child == 0:  # no assertion here: it would run the rest of the tests twice
        os._exit(0 if torch.equal(layer(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(layer(x), expected)


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidInput, match="1 to 64"):
        operators.set_threads(0)
    with pytest.raises(InvalidInput, match="sse9"):
        operators.set_isa("sse9")
