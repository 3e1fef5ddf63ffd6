"""Attention of a padded batch equals attention sequence by sequence, and reads nothing but its own sequences."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.attention.backend import AttentionShape, LayerAttend
from cospec.models.attention.padded_sdpa import Frame, Padded, frame_of, worthwhile
from cospec.models.attention.sdpa import SDPA
from cospec.models.block_manager import BlockPool
from cospec.models.input_batch import SequenceSpan
from cospec.models.kv_cache import KVCache, LayerShape

CPU = torch.device("cpu")
TREE = (-1, -1, 0, 0, 1, 2, 4, 6)
RAGGED = (
    SequenceSlice("a", 40, (1,)),
    SequenceSlice("b", 3, (1, 2, 3, 4), parents=(-1, 0, 1)),
    SequenceSlice("c", 17, (5,) * (1 + len(TREE)), parents=TREE),
    SequenceSlice("d", 0, (1, 2, 3, 4, 5, 6)),
)
DECODE = (
    SequenceSlice("a", 40, (1,)),
    SequenceSlice("b", 3, (2,)),
    SequenceSlice("c", 0, (3,)),
    SequenceSlice("d", 15, (4,)),
)


def filled(by_head: bool, count: int = 2) -> KVCache:
    """A cache with scattered pages, whose entries beyond the reserved ones hold what no result may show."""
    pool = BlockPool(40, 8)
    kv = KVCache([LayerShape(count, 16)] * 2, pool, torch.float32, CPU, by_head)
    for part in (1, 2, 3):
        for id in "abcd":
            assert pool.allocate(id, 48 * part // 3)
    for layer in kv.layers:
        layer.keys.copy_(torch.randn(layer.keys.shape))
        layer.values.copy_(torch.randn(layer.values.shape))
    return kv


def poison(kv: KVCache, segments: tuple[SequenceSlice, ...]) -> None:
    """Everything that these segments neither hold nor write."""
    held = torch.zeros(40, 8, dtype=torch.bool)
    for segment in segments:
        for index in range(segment.start + len(segment.tokens)):
            held[kv.pages.table(segment.id)[index // 8], index % 8] = True
    for layer in kv.layers:
        for entries in (layer.keys, layer.values):
            entries.transpose(1, 2)[~held] = float("nan")


@pytest.mark.parametrize(
    "heads", [AttentionShape(0.3), AttentionShape(0.3, window=3), AttentionShape(0.3, window=9, softcap=2.0)], ids=str
)
@pytest.mark.parametrize("segments", [RAGGED, DECODE, DECODE[:1]], ids=["ragged", "decode", "one"])
@pytest.mark.parametrize(("by_head", "shared"), [(True, 2), (False, 2), (False, 4)])
def test_equals_each_sequence_alone(
    by_head: bool, shared: int, segments: tuple[SequenceSlice, ...], heads: AttentionShape
) -> None:
    torch.manual_seed(5)
    kv = filled(by_head, shared)
    poison(kv, segments)
    batch = kv.pack(TokenBatch(segments))
    total = batch.ids.shape[0]
    inputs = [tuple(torch.randn(total, count, 16) for count in (4, shared, shared)) for _ in kv.layers]

    def play(attend: LayerAttend, layer: int, rows: slice = slice(None)) -> Tensor:
        q, k, v = (x[rows] for x in inputs[layer])
        return attend(q, k, v, kv.layers[layer], heads)

    exact, larger = frame_of(batch.spans), Frame(rows=10, entries=48, trees=True)
    found = [[play(attend, layer) for layer in (0, 1)] for attend in (Padded(batch, exact), Padded(batch, larger))]
    for layer, (span, segment) in itertools.product((0, 1), zip(batch.spans, segments, strict=True)):
        rows = slice(span.first, span.first + span.rows)
        alone = play(SDPA.prepare(kv.pack(TokenBatch((segment,)))), layer, rows)
        for results in found:
            torch.testing.assert_close(results[layer][rows], alone, atol=1e-5, rtol=1e-4)


def choice(*shapes: tuple[int, int]) -> bool:
    """Whether sequences of so many ``(rows, entries)`` are padded."""
    spans = [SequenceSpan(0, rows, length - rows, (), tree=False) for rows, length in shapes]
    return worthwhile(spans, frame_of(spans), CPU)


def test_padding_is_for_short_rows_of_like_lengths() -> None:
    assert choice((1, 41), (1, 21))
    assert choice((3, 43), (1, 41))
    assert choice(*[(4, 300)] * 64)
    assert not choice((1, 41))
    assert not choice((1, 201), (1, 3))
    assert not choice((33, 33), (33, 33))
    assert not choice(*[(1, 2048)] * 64), "the keys and values of all would be copied at once"
