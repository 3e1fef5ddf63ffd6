"""Attention back ends on a CUDA device against plain attention in float64, and bits that no other row changes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.attention.backend import AttentionBackend, AttentionShape
from cospec.models.attention.sdpa import SDPA
from cospec.models.attention.triton_paged import TritonAttention
from cospec.models.input_batch import InputBatch, pack
from cospec.models.kv_cache import LayerBlocks, LayerShape
from cospec.models.kv_cache_formats import CACHE_DTYPES, encode
from harness.attention import (
    ATTENTION_LAYERS,
    ATTENTION_SEGMENTS,
    SCALE,
    TREE,
    AttentionCase,
    attention_case,
    dense_attention,
)

DEVICE = torch.device("cuda")
LONG = SequenceSlice("long", 262, (1, 2, 3, 4), parents=(-1, 0, 1))  # two parts of the context
SHORT = SequenceSlice("short", 30, (1,))
BRANCHING = SequenceSlice("tree", 254, (1, 2, 3, 4, 5, 6, 7, 8), parents=TREE)
# Relative to plain attention; products of bfloat16 and float16 numbers, and of 8 bits, are rounded more.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.int8: 2e-2}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
both = pytest.mark.parametrize("backend", [SDPA, TritonAttention()], ids=lambda backend: backend.name)


def on_device(batch: InputBatch) -> InputBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved: dict[str, Any] = {name: x.to(DEVICE) for name, x in values.items() if isinstance(x, Tensor)}
    return replace(batch, **moved)


def attended(
    backend: AttentionBackend,
    case: AttentionCase,
    kinds: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    **layer: Any,
) -> Tensor:
    """Attention on the device; ``kinds`` are the dtypes of the queries and of the cache."""
    if reason := backend.why_not(DEVICE, [LayerShape(2, 32)], 16):
        pytest.skip(reason)
    keys, values = (encode(pages.clone(), kinds[1]).to(DEVICE) for pages in (case.k_pages, case.v_pages))
    if backend.by_head:
        keys, values = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (keys, values))
    q, k, v = (x.to(DEVICE, kinds[0]) for x in (case.q, case.k, case.v))
    attend = backend.prepare(on_device(case.batch))
    return attend(q, k, v, LayerBlocks(keys, values), AttentionShape(SCALE, **layer)).cpu().double()


@both
@pytest.mark.parametrize("layer", ATTENTION_LAYERS, ids=str)
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_attention_is_a_masked_softmax(backend: AttentionBackend, layer: dict[str, Any], dim: int) -> None:
    case = attention_case((*ATTENTION_SEGMENTS, LONG), dim)
    error = (attended(backend, case, **layer) - dense_attention(case, **layer)).abs().max()
    assert float(error) < TOLERANCE[torch.float32]


@both
@pytest.mark.parametrize("cache", CACHE_DTYPES.values(), ids=str)
def test_caches_of_few_bits(backend: AttentionBackend, cache: torch.dtype) -> None:
    case = attention_case((*ATTENTION_SEGMENTS, LONG))
    queries = torch.bfloat16 if cache is torch.bfloat16 else torch.float32
    error = (attended(backend, case, (queries, cache)) - dense_attention(case, dtype=cache)).abs().max()
    assert float(error) < TOLERANCE[cache]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_other_sequence_changes_a_bit(dtype: torch.dtype) -> None:
    backend, kinds = TritonAttention(), (dtype, dtype)
    together = attended(backend, attention_case((SHORT, LONG, BRANCHING)), kinds)
    for slice, rows in ((SHORT, together[:1]), (LONG, together[1:5]), (BRANCHING, together[5:])):
        assert torch.equal(attended(backend, attention_case((slice,)), kinds), rows)


def test_a_row_of_a_draft_attends_as_a_decoding_step() -> None:
    """The last row of a draft gets the same bits as a step of one row, whose entries are in the cache."""
    draft = attention_case((LONG,))
    step = replace(draft, q=draft.q[3:], k=draft.k[3:], v=draft.v[3:])
    pages = LayerBlocks(draft.k_pages.to(DEVICE), draft.v_pages.to(DEVICE))
    backend = TritonAttention()
    if reason := backend.why_not(DEVICE, [LayerShape(2, 32)], 16):
        pytest.skip(reason)

    def found(case: AttentionCase, batch: InputBatch) -> Tensor:
        q, k, v = (x.to(DEVICE) for x in (case.q, case.k, case.v))
        return backend.prepare(batch)(q, k, v, pages, AttentionShape(SCALE))

    wanted = found(draft, on_device(draft.batch))[3:]
    slice = SequenceSlice("long", LONG.start + 3, (4,))
    table = {"long": draft.batch.tables[0].tolist()}
    batch = pack(TokenBatch((slice,)), table, 16, DEVICE)
    assert torch.equal(found(step, batch), wanted)
    less = replace(batch, visible=batch.visible - 1)
    assert not torch.equal(found(step, less), wanted), "control: a row that attends one entry less"


def test_batches_of_all_sizes_share_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles once with and once without trees; control: another head dimension compiles again."""
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **call: compiled.append(call["repr"]))
    kinds = [(LONG,), (BRANCHING,), (SHORT, LONG, BRANCHING)]
    for case in kinds:
        attended(TritonAttention(), attention_case(case))
    compiled.clear()
    for case in [*kinds, *[(replace(SHORT, start=start),) for start in range(99)]]:
        attended(TritonAttention(), attention_case(case))
    assert not compiled
    attended(TritonAttention(), attention_case((SHORT,), 40))
    assert compiled
