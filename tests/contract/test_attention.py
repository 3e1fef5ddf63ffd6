"""Every attention back end of the table against plain attention in float64, alone and in the Llama forward."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cospec.core.model_io import SequenceSlice
from cospec.errors import InvalidInput
from cospec.models.attention.backend import AttentionBackend, AttentionShape, LayerAttend, choose_attention
from cospec.models.attention.sdpa import SDPA
from cospec.models.attention.triton_paged import TritonAttention
from cospec.models.cuda_graphs import GraphRunner, StaticBatch, Step, graph_shape_of, places, sources
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import LayerBlocks, LayerShape
from cospec.models.kv_cache_formats import CACHE_DTYPES, encode
from cospec.registry import ATTENTION_BACKENDS
from harness.attention import (
    ATTENTION_LAYERS,
    ATTENTION_SEGMENTS,
    SCALE,
    AttentionCase,
    attention_case,
    dense_attention,
)
from harness.decoding import play, runner_of

CPU = torch.device("cpu")
NAMES = ATTENTION_BACKENDS.names
every_backend = pytest.mark.parametrize("backend", [ATTENTION_BACKENDS.load(name)() for name in NAMES], ids=NAMES)
STEPS = tuple(SequenceSlice(name, start, (1,)) for name, start in (("a", 37), ("b", 3), ("c", 0), ("d", 15)))
BATCHES = {
    "all": ATTENTION_SEGMENTS,  # a step, a prompt, a chain and a tree
    "chains": (*STEPS[:2], SequenceSlice("chain", 40, (1, 2, 3, 4), parents=(-1, 0, 1))),
    "steps": STEPS,
    "chunk": (SequenceSlice("prefill", 90, tuple(range(33))),),
    "trees": (ATTENTION_SEGMENTS[3], SequenceSlice("other", 11, (1, 2, 3, 4), parents=(-1, -1, 0))),
}


def need(backend: AttentionBackend, dim: int = 32, page_size: int = 16) -> None:
    reason = backend.why_not(CPU, [LayerShape(2, dim)], page_size)
    if reason:
        pytest.skip(reason)


def layer_of(backend: AttentionBackend, case: AttentionCase, dtype: torch.dtype = torch.float32) -> LayerBlocks:
    """A copy of the pages in the layout of the back end."""
    k, v = (encode(pages.clone(), dtype) for pages in (case.k_pages, case.v_pages))
    if backend.by_head:
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    return LayerBlocks(k, v)


def attended(attend: LayerAttend, backend: AttentionBackend, case: AttentionCase, **layer: Any) -> Tensor:
    return attend(case.q, case.k, case.v, layer_of(backend, case), AttentionShape(SCALE, **layer)).double()


def worst(found: Tensor, case: AttentionCase, **layer: Any) -> float:
    """The largest distance from plain attention; NaN if an entry was read that no sequence wrote."""
    return float((found - dense_attention(case, **layer)).abs().max())


# Masks do not depend on how heads share keys, so other heads meet no mask and the one with everything.
CASES = [
    *((name, (4, 2), layer) for name, layer in itertools.product(BATCHES, ATTENTION_LAYERS)),
    *(
        (name, heads, layer)
        for name, heads in (("all", (2, 2)), ("chains", (6, 1)))
        for layer in (ATTENTION_LAYERS[0], ATTENTION_LAYERS[-1])
    ),
]


@every_backend
@pytest.mark.parametrize(("name", "heads", "layer"), CASES, ids=str)
def test_attention_is_a_masked_softmax(
    backend: AttentionBackend, name: str, heads: tuple[int, int], layer: dict[str, Any]
) -> None:
    need(backend)
    case = attention_case(BATCHES[name], heads=heads)
    assert worst(attended(backend.prepare(case.batch), backend, case, **layer), case, **layer) < 1e-5


@every_backend
@pytest.mark.parametrize("name", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("batch", ["all", "steps"])
def test_entries_of_every_dtype(backend: AttentionBackend, name: str, batch: str) -> None:
    """Entries are rounded, and nothing else; a reference without the rounding is far away."""
    need(backend)
    case, dtype = attention_case(BATCHES[batch]), CACHE_DTYPES[name]
    pages = layer_of(backend, case, dtype)
    found = backend.prepare(case.batch)(case.q, case.k, case.v, pages, AttentionShape(SCALE)).double()
    assert float((found - dense_attention(case, dtype=dtype)).abs().max()) < 1e-5
    assert float((found - dense_attention(case)).abs().max()) > 1e-4


@pytest.mark.parametrize(("dim", "page_size"), [(64, 8), (24, 24)])
@every_backend
def test_heads_and_pages_of_other_sizes(backend: AttentionBackend, dim: int, page_size: int) -> None:
    need(backend, dim, page_size)
    case = attention_case(ATTENTION_SEGMENTS, dim, page_size=page_size)
    assert worst(attended(backend.prepare(case.batch), backend, case), case) < 1e-5


@every_backend
def test_a_wrong_mask_is_found(backend: AttentionBackend) -> None:
    """Negative control: every row but the first of a sequence attends one entry less."""
    need(backend)
    case = attention_case(ATTENTION_SEGMENTS)
    wrong = replace(case.batch, visible=(case.batch.visible - 1).clamp(min=1))
    assert not worst(attended(backend.prepare(wrong), backend, case), case) < 1e-3


@every_backend
def test_new_keys_and_values_are_written(backend: AttentionBackend) -> None:
    need(backend)
    case = attention_case(ATTENTION_SEGMENTS)
    pages = layer_of(backend, case)
    backend.prepare(case.batch)(case.q, case.k, case.v, pages, AttentionShape(SCALE))
    at = case.batch.write_at.long()
    page, slot = case.batch.tables[case.batch.row_segment.long(), at // 16].long(), at % 16
    for now, then, new in ((pages.keys, case.k_pages, case.k), (pages.values, case.v_pages, case.v)):
        assert torch.equal(now[page, :, slot], new)
        kept = torch.ones(now.shape[0], 16, dtype=torch.bool).index_put((page, slot), torch.tensor(False))
        assert torch.equal(now.transpose(1, 2)[kept].nan_to_num(7), then.transpose(1, 2)[kept].nan_to_num(7))


@every_backend
@pytest.mark.parametrize("layer", ATTENTION_LAYERS, ids=str)
@pytest.mark.parametrize("name", ["steps", "chains", "trees"])
def test_a_captured_batch_takes_its_contents_from_tensors(
    backend: AttentionBackend, layer: dict[str, Any], name: str
) -> None:
    need(backend)
    slices = BATCHES[name]
    shape = graph_shape_of(attention_case(slices).batch, backend.capture_entries)
    if not backend.capture_entries:
        assert shape is None
        return
    assert shape is not None and shape.slices >= len(slices)
    static = StaticBatch(shape, 16, CPU)
    for case in (attention_case(slices[::-1]), attention_case(slices)):
        static.fill(case.batch)
        rows = sources(case.batch.spans, shape)
        padded = replace(case, q=case.q[rows], k=case.k[rows], v=case.v[rows])
        found = attended(backend.capture(static.batch), backend, padded, **layer)
        assert worst(found[places(case.batch.spans, shape)], case, **layer) < 1e-5


@pytest.mark.parametrize(
    ("attention", "name"),
    [*itertools.product(("native", "sdpa"), ("llama", "mistral-window", "qwen3")), ("triton", "mistral-window")],
)
def test_the_llama_forward_takes_every_back_end(attention: str, name: str) -> None:
    backend = ATTENTION_BACKENDS.load(attention)()
    need(backend)
    for found, wanted in zip(play(*runner_of(name, attention=backend)), play(*runner_of(name)), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


class Counted(AttentionBackend):
    """Stock attention that counts preparations."""

    name = "counted"
    by_head = False
    capture_entries = SDPA.capture_entries

    def __init__(self) -> None:
        self.prepared = self.captured = 0

    def prepare(self, batch: InputBatch) -> LayerAttend:
        self.prepared += 1
        return SDPA.prepare(batch)

    def capture(self, batch: InputBatch) -> LayerAttend:
        self.captured += 1
        return SDPA.capture(batch)

    def why_not(self, device: torch.device, shapes: object, page_size: int) -> str:
        return ""


def test_forward_and_graphs_use_the_back_end_that_was_chosen() -> None:
    def again(step: Step) -> Step:
        kept: Tensor = step()
        return lambda: kept.copy_(step())

    backend = Counted()
    runner, kv = runner_of("llama", attention=backend)
    for found, wanted in zip(play(GraphRunner(runner, again), kv), play(*runner_of("llama")), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert backend.captured >= 3 and backend.prepared == 5, "the prompts, another pattern, and three first steps"


class Uncaptured(Counted):
    """Stock attention that captures nothing."""

    capture_entries = 0


def test_a_back_end_that_captures_nothing_runs_without_graphs() -> None:
    backend = Uncaptured()
    runner, kv = runner_of("llama", attention=backend)
    assert len(play(GraphRunner(runner, lambda step: step), kv)) == backend.prepared
    assert backend.captured == 0


@pytest.mark.parametrize(("name", "device"), [("flash", "cpu"), ("native", "cuda")])
def test_unusable_back_ends_are_refused(name: str, device: str) -> None:
    with pytest.raises(InvalidInput, match=f"attention_backend is '{name}'; allowed is auto or .*sdpa"):
        choose_attention(name, torch.device(device), (), 16)


def test_auto_is_the_first_usable_back_end() -> None:
    lacks_triton = TritonAttention().why_not(torch.device("cuda"), (), 16)
    assert choose_attention("auto", torch.device("cuda"), (), 16).name == ("sdpa" if lacks_triton else "triton")
    assert choose_attention("auto", CPU, [LayerShape(2, 12)], 16).name == "sdpa"
    usable = [name for name in ("native", "sdpa") if not ATTENTION_BACKENDS.load(name)().why_not(CPU, (), 16)]
    assert choose_attention("auto", CPU, (), 16).name == usable[0]
