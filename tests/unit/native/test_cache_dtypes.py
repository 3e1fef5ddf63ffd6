"""The attention kernel over entries of every dtype, and over long contexts that threads share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.attention.backend import AttentionShape
from cospec.models.attention.sdpa import SDPA
from cospec.models.block_manager import BlockPool
from cospec.models.kv_cache import KVCache, LayerShape
from cospec.models.kv_cache_formats import CACHE_DTYPES, decode, encode
from cospec.native import operators
from cospec.native.library import offered
from harness.attention import ATTENTION_SEGMENTS, SCALE, AttentionCase, attention_case, dense_attention

pytestmark = [
    pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels"),
    pytest.mark.usefixtures("restored_kernels"),
]
every_dtype = pytest.mark.parametrize("dtype", CACHE_DTYPES.values(), ids=CACHE_DTYPES)


def run(case: AttentionCase, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's output, and the pages afterwards."""
    k_pages, v_pages = (encode(pages.clone(), dtype) for pages in (case.k_pages, case.v_pages))
    found = operators.attention(case.q, case.k, case.v, k_pages, v_pages, case.batch, SCALE, **options)
    return found, k_pages, v_pages


@every_dtype
@pytest.mark.parametrize(
    ("dim", "heads", "page_size"),
    [(32, (4, 2), 16), (64, (2, 2), 8), (24, (6, 1), 24), (8, (3, 3), 16), (128, (5, 1), 16)],
)
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 5.0}], ids=str)
def test_attention_is_masked_softmax_with_the_same_bits_everywhere(
    dtype: torch.dtype, dim: int, heads: tuple[int, int], page_size: int, options: dict[str, Any]
) -> None:
    case = attention_case(ATTENTION_SEGMENTS, dim, heads, page_size)
    expected, *_ = run(case, dtype, **options)
    torch.testing.assert_close(expected.double(), dense_attention(case, **options, dtype=dtype), rtol=1e-5, atol=1e-5)
    for isa in offered():
        for threads in (1, 2):
            operators.set_isa(isa)
            operators.set_threads(threads)
            assert torch.equal(run(case, dtype, **options)[0], expected), (isa, threads)
    for span, part in zip(case.batch.spans, ATTENTION_SEGMENTS, strict=True):
        alone, *_ = run(attention_case((part,), dim, heads, page_size), dtype, **options)
        assert torch.equal(alone, expected[span.first : span.first + span.rows]), part.id


@every_dtype
def test_the_rounding_shows(dtype: torch.dtype) -> None:
    """Negative control: the reference without rounding is farther away than the tolerance."""
    case = attention_case(ATTENTION_SEGMENTS)
    far = float((run(case, dtype)[0].double() - dense_attention(case)).abs().max())
    assert far < 1e-5 if dtype is torch.float32 else 1e-4 < far < 0.05


@every_dtype
def test_entries_are_written_as_the_reference_rounds(dtype: torch.dtype) -> None:
    case = attention_case(ATTENTION_SEGMENTS)
    special = [0.0, -0.0, 1e-31, 6e-8, 3e-8, 1e-41, 65519.0, 65520.0, 1 + 2**-8, 1 + 3 * 2**-8, -2.5, 126.5]
    case.k[0, 0, : len(special)] = torch.tensor(special)
    case.k[1, 0] = 0.0
    case.k[2, 0] = 1e-31
    case.k[3, 0, 3], case.k[4, 0, 3] = float("nan"), float("inf")
    _, k_pages, v_pages = run(case, dtype)
    at = case.batch.write_at.long()
    page, slot = case.batch.tables[case.batch.row_segment.long(), at // 16].long(), at % 16
    for pages, new in ((k_pages, case.k), (v_pages, case.v)):
        found, wanted = pages[page, :, slot], encode(new, dtype)
        assert torch.equal(*(decode(x, torch.float32).nan_to_num(7.0) for x in (found, wanted)))


CONTEXT = 6 * 256 + 70


@every_dtype
@pytest.mark.parametrize("heads", [(2, 1), (4, 2)], ids=str)
def test_threads_share_a_long_context(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """A row has the same bits alone and among rows, for any number of threads; torch's attention agrees."""
    torch.manual_seed(1)
    rows, dim = 30, 32
    pool = BlockPool(CONTEXT // 16 + 1, 16)
    assert pool.allocate("a", CONTEXT)
    cache = KVCache([LayerShape(heads[1], dim)], pool, dtype, torch.device("cpu"))
    (layer,) = cache.layers
    for pages in (layer.keys, layer.values):
        pages.copy_(encode(torch.randn(*pages.shape[:3], dim), dtype))
    q, k, v = (torch.randn(rows, count, dim) for count in (heads[0], heads[1], heads[1]))

    def attended(first: int, last: int, window: int | None = None) -> Tensor:
        batch = cache.pack(TokenBatch((SequenceSlice("a", CONTEXT - rows + first, (1,) * (last - first)),)))
        part = slice(first, last)
        return operators.attention(q[part], k[part], v[part], layer.keys, layer.values, batch, 0.3, window)

    batch = cache.pack(TokenBatch((SequenceSlice("a", CONTEXT - rows, (1,) * rows),)))
    for window in (None, 700):
        operators.set_threads(1)
        expected = attended(0, rows, window)
        plain = SDPA.prepare(batch)(q, k, v, layer, AttentionShape(0.3, window))
        torch.testing.assert_close(expected, plain, rtol=1e-5, atol=1e-5)
        for isa in offered():
            operators.set_isa(isa)
            for threads in (1, 2, 5):
                operators.set_threads(threads)
                assert torch.equal(attended(0, rows, window), expected), (isa, threads)
                assert torch.equal(attended(7, 8, window), expected[7:8]), (isa, threads)
                assert torch.equal(attended(20, rows, window), expected[20:]), (isa, threads)
