"""Attention batches with shuffled pages, and their attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.input_batch import InputBatch, pack
from cospec.models.kv_cache_formats import decode, encode

SCALE = 0.2


@dataclass(frozen=True)
class AttentionCase:
    """A batch whose sequences have earlier entries in the cache, with the batch's queries, keys and values."""

    slices: tuple[SequenceSlice, ...]
    batch: InputBatch
    heads: tuple[int, int]
    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor


TREE = (-1, -1, 0, 0, 1, 2, 4)
ATTENTION_SEGMENTS = (
    SequenceSlice("decode", 37, (1,)),
    SequenceSlice("prefill", 0, tuple(range(20))),
    SequenceSlice("chain", 130, (1, 2, 3, 4), parents=(-1, 0, 1)),
    SequenceSlice("tree", 60, (1, 2, 3, 4, 5, 6, 7, 8), parents=TREE),
)
ATTENTION_LAYERS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 9},
    {"window": 2},
    {"softcap": 5.0},
    {"window": 70, "softcap": 2.0},
)


def history(name: str, start: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence's earlier entries, which do not depend on the rest of the batch."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    keys, values = torch.randn(2, start + 40, *shape, generator=generator)
    return keys, values


def attention_case(
    slices: tuple[SequenceSlice, ...], dim: int = 32, heads: tuple[int, int] = (4, 2), page_size: int = 16
) -> AttentionCase:
    """Pages in shuffled order; entries that no sequence wrote are NaN, so that one read of such an entry shows."""
    torch.manual_seed(len(slices) + page_size)
    total = 48
    order = torch.randperm(total * 16 // page_size).tolist()
    k_pages, v_pages = torch.full((2, len(order), heads[1], page_size, dim), float("nan"))
    tables, new_k, new_v, queries = {}, [], [], []
    for part in slices:
        start, count = part.start, len(part.tokens)
        table = [order.pop() for _ in range(-(-(start + count) // page_size))]
        keys, values = history(part.id, start, (heads[1], dim))
        for entry in range(start):
            k_pages[table[entry // page_size], :, entry % page_size] = keys[entry]
            v_pages[table[entry // page_size], :, entry % page_size] = values[entry]
        tables[part.id] = table
        new_k.append(keys[start : start + count])
        new_v.append(values[start : start + count])
        generator = torch.Generator().manual_seed(start)
        queries.append(torch.randn(count, heads[0], dim, generator=generator))
    batch = pack(TokenBatch(slices), tables, page_size, torch.device("cpu"))
    return AttentionCase(slices, batch, heads, torch.cat(queries), torch.cat(new_k), torch.cat(new_v), k_pages, v_pages)


def dense_attention(
    case: AttentionCase, window: int | None = None, softcap: float | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The same attention in float64, row by row over whole sequences, of a cache of ``dtype``."""
    batch, result = case.batch, torch.empty_like(case.q, dtype=torch.float64)
    for span, part in zip(batch.spans, case.slices, strict=True):
        rows = range(span.first, span.first + span.rows)
        held = history(part.id, part.start, (case.heads[1], case.q.shape[2]))
        keys, values = (decode(encode(x, dtype), torch.float32).double() for x in held)
        position = torch.arange(span.length)
        position[span.start :] = batch.positions[rows.start : rows.stop]
        entries = torch.arange(span.length)
        for row in rows:
            visible, mask = int(batch.visible[row]), int(batch.mask[row])
            allowed = entries < visible
            nodes = [0 <= e - visible < 64 and mask >> (e - visible) & 1 == 1 for e in entries.tolist()]
            allowed |= torch.tensor(nodes)
            if window is not None:
                allowed &= batch.positions[row] - position < window
            for head in range(case.heads[0]):
                shared = head // (case.heads[0] // case.heads[1])
                scores = keys[: span.length, shared] @ case.q[row, head].double() * SCALE
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                weights = scores.masked_fill(~allowed, float("-inf")).softmax(0)
                result[row, head] = weights @ values[: span.length, shared]
    return result
