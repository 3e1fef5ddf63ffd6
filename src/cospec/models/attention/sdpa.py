"""Stock attention on any device: short sequences together, other sequences one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cospec.models.attention.backend import AttentionBackend, AttentionShape, LayerAttend
from cospec.models.attention.padded_sdpa import MAX_ENTRIES, Entries, Frame, Padded, capped, frame_of, worthwhile
from cospec.models.input_batch import InputBatch, SequenceSpan
from cospec.models.kv_cache import LayerBlocks, LayerShape
from cospec.models.kv_cache_formats import decode


class SdpaAttention(AttentionBackend):
    """``scaled_dot_product_attention`` over gathered pages, or over a view of adjacent pages."""

    name = "sdpa"
    by_head = True
    capture_entries = MAX_ENTRIES

    def prepare(self, batch: InputBatch) -> LayerAttend:
        """See ``AttentionBackend``."""
        frame = frame_of(batch.spans)
        return Padded(batch, frame) if worthwhile(batch.spans, frame, batch.ids.device) else _BySequence(batch)

    def capture(self, batch: InputBatch) -> LayerAttend:
        """See ``AttentionBackend``."""
        rows = len(batch.ids) // len(batch.tables)
        return Padded(batch, Frame(rows, entries=batch.tables.shape[1] * batch.page_size, trees=rows > 1))

    def why_not(self, device: torch.device, shapes: Sequence[LayerShape], page_size: int) -> str:
        """See ``AttentionBackend``."""
        return ""


SDPA = SdpaAttention()


class _BySequence:
    """The data that all layers of one forward share: write positions, and masks per window."""

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        at = batch.write_at.long()
        self._page = batch.tables[batch.row_segment.long(), at // batch.page_size].long()
        self._slot = at % batch.page_size
        self._masks: dict[int | None, list[Tensor | None]] = {}
        self._scattered = [_scattered(batch, number) for number in range(len(batch.spans))]

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, pages: LayerBlocks, heads: AttentionShape
    ) -> Tensor:
        pages.write(self._page, self._slot, keys, values)
        if heads.window not in self._masks:
            self._masks[heads.window] = [_mask(self._batch, span, heads.window) for span in self._batch.spans]
        masks = self._masks[heads.window]
        product = _plain if heads.softcap is None else _capped
        result = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for span, scattered, mask in zip(self._batch.spans, self._scattered, masks, strict=True):
            rows = slice(span.first, span.first + span.rows)
            found = (_view(pages.keys, span), _view(pages.values, span)) if scattered is None else scattered(pages)
            k, v = (decode(entries, queries.dtype) for entries in found)
            result[rows] = product(queries[rows].transpose(0, 1), k, v, mask, heads).transpose(0, 1)
        return result


def _scattered(batch: InputBatch, number: int) -> Entries | None:
    """Return the gather indices of one sequence's cache entries; None if its pages are adjacent."""
    span, size = batch.spans[number], batch.page_size
    if span.pages == tuple(range(span.pages[0], span.pages[0] + len(span.pages))):
        return None
    entry = torch.arange(span.length, device=batch.tables.device)
    return Entries(batch.tables[number].long()[entry // size], entry % size)


def _view(pages: Tensor, span: SequenceSpan) -> Tensor:
    """Return cache entries ``[Hkv, length, W]`` of a sequence with adjacent pages; no copy if heads are outermost."""
    found = pages.transpose(0, 1)[:, span.pages[0] : span.pages[-1] + 1]
    return found.flatten(1, 2)[:, : span.length]


def _mask(batch: InputBatch, span: SequenceSpan, window: int | None) -> Tensor | None:
    """Return the attention mask, bool ``[rows, length]``; None if one row attends all entries."""
    rows = slice(span.first, span.first + span.rows)
    if span.rows == 1 and (window is None or span.length <= window):
        return None
    entries = torch.arange(span.length, device=batch.ids.device)
    visible = batch.visible[rows, None]
    allowed = entries < visible
    if span.tree:
        bit = (entries - visible).clamp(0, 63)
        allowed |= ((batch.mask[rows, None] >> bit) & 1).bool()
    if window is not None:
        position = entries.clone()
        position[span.start :] = batch.positions[rows]
        allowed &= batch.positions[rows, None] - position < window
    return allowed


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: AttentionShape) -> Tensor:
    """Attend with ``q [H, n, D]``, ``k`` and ``v`` ``[Hkv, length, D]``; returns ``[H, n, D]``."""
    grouped = q.shape[0] != k.shape[0]
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, scale=heads.scale, enable_gqa=grouped
    )[0]


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: AttentionShape) -> Tensor:
    """Attend like ``_plain``, with soft-capped products."""
    added = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    grouped = q.unflatten(0, (k.shape[0], -1))
    return capped(grouped, k[:, None], v[:, None], added, heads).flatten(0, 1)
