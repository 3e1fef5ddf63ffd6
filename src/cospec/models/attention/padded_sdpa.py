"""Stock attention of several sequences in one call, padded to the same number of rows and cache entries.

Tensors on the batch's device hold all data; only sizes are Python numbers. Thus the same operations can be captured as
CUDA graphs and replayed with other contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from cospec.models.input_batch import InputBatch, SequenceSpan
from cospec.models.kv_cache import LayerBlocks
from cospec.models.kv_cache_formats import decode

if TYPE_CHECKING:
    from cospec.models.attention.backend import AttentionShape

# The cost of a separate call per sequence, in products of queries with keys. Gathering an entry costs as much as 4
# products. Measured on one CPU core with 8 heads of 64; on a GPU the launches cost far more.
CALL_COST = {"cpu": 384}
CALL_COST_ELSEWHERE = 32768
MAX_ENTRIES = 1 << 16  # gathered at once, which bounds the memory
MAX_ROWS = 32  # with more rows separate calls pay, and padded masks would grow large


@dataclass(frozen=True, slots=True)
class Frame:
    """The sizes after padding.

    Attributes:
        rows: rows of each sequence in the batch.
        entries: cache entries of each sequence.
        trees: whether rows may be nodes of branching trees.
    """

    rows: int
    entries: int
    trees: bool = False


def frame_of(spans: Sequence[SequenceSpan]) -> Frame:
    """Return the smallest frame for all sequences; entries are a multiple of 8 for GPU kernels."""
    return Frame(
        rows=max(span.rows for span in spans),
        entries=-(-max(span.length for span in spans) // 8) * 8,
        trees=any(span.tree for span in spans),
    )


def worthwhile(spans: Sequence[SequenceSpan], frame: Frame, device: torch.device) -> bool:
    """Whether one padded call is faster than a call per sequence: few rows each, and little padding."""
    if len(spans) == 1 or frame.rows > MAX_ROWS or len(spans) * frame.entries > MAX_ENTRIES:
        return False
    padded = len(spans) * (frame.rows + 4) * frame.entries
    wasted = padded - sum((span.rows + 4) * span.length for span in spans)
    return wasted <= CALL_COST.get(device.type, CALL_COST_ELSEWHERE) * len(spans)


class Entries:
    """Gathers the same cache entries from every layer; layers of one shape share the memory.

    Args:
        page, slot: int64 ``[..., length]``, the place of each entry.
    """

    def __init__(self, page: Tensor, slot: Tensor) -> None:
        self._page, self._slot = page, slot
        self._found: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, pages: LayerBlocks) -> tuple[Tensor, Tensor]:
        """Return keys and values, each ``[..., Hkv, length, W]``, valid until the next call."""
        (_, count, _, dim), steps = pages.keys.shape, pages.keys.stride()
        key = count, dim, steps
        if key not in self._found:
            # Gathering rows of memory by index is by far the fastest way.
            head = torch.arange(count, device=self._page.device)[:, None] * (steps[1] // dim)
            rows = (self._page * (steps[0] // dim) + self._slot * (steps[2] // dim))[..., None, :] + head
            size = rows.numel(), dim
            self._found[key] = rows, pages.keys.new_empty(size), pages.keys.new_empty(size)
        rows, keys, values = self._found[key]
        for memory, result in ((pages.keys, keys), (pages.values, values)):
            flat = memory.as_strided((memory.numel() // dim, dim), (dim, 1))
            torch.index_select(flat, 0, rows.flatten(), out=result)
        return keys.view(*rows.shape, dim), values.view(*rows.shape, dim)


class Padded:
    """The attention of one batch, prepared once and called once per layer, see ``LayerAttend``.

    The padding repeats a sequence's last row and entries, so that no other memory is read.
    """

    def __init__(self, batch: InputBatch, frame: Frame) -> None:
        self._batch, self._frame = batch, frame
        size = batch.page_size
        self._segment, self._starts = batch.row_segment.long(), batch.starts.long()
        at = batch.write_at.long()
        self._page, self._slot = batch.tables[self._segment, at // size].long(), at % size
        last = self._starts[1:] - 1
        self._take = torch.minimum(self._starts[:-1, None] + self._count(frame.rows), last[:, None])
        entry = torch.minimum(self._count(frame.entries), at[last, None])
        self._entries = Entries(batch.tables.long().gather(1, entry // size), entry % size)
        self._back = self._segment * frame.rows + self._count(at.shape[0]) - self._starts[self._segment]
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, pages: LayerBlocks, heads: AttentionShape
    ) -> Tensor:
        pages.write(self._page, self._slot, keys, values)
        (_, count, dim), rows, shared = queries.shape, self._frame.rows, keys.shape[1]
        group = count // shared
        # The queries that share keys become rows of the same head.
        q = queries if rows == 1 else queries[self._take].flatten(0, 1)
        q = q.view(-1, rows, shared, group, dim).permute(0, 2, 3, 1, 4).reshape(-1, shared, group * rows, dim)
        k, v = (decode(entries, q.dtype) for entries in self._entries(pages))
        product = _plain if heads.softcap is None else capped
        result: Tensor = product(q, k, v, self._mask(heads.window, group, q.dtype), heads)
        result = result.unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4).reshape(-1, count, dim)
        return result if rows == 1 else result[self._back]

    def _count(self, end: int) -> Tensor:
        return torch.arange(end, device=self._starts.device)

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask, 0 or minus infinity: ``[S, 1, group * rows, entries]``."""
        key = window, group, dtype
        if key not in self._masks:
            allowed = self._allowed(window).repeat(1, group, 1)[:, None]
            zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            self._masks[key] = zeros.masked_fill_(~allowed, float("-inf"))
        return self._masks[key]

    def _allowed(self, window: int | None) -> Tensor:
        """Return the allowed pairs, bool ``[S, rows, entries]``."""
        batch, entry = self._batch, self._count(self._frame.entries)
        visible = batch.visible.long()[self._take, None]
        allowed = entry < visible
        if self._frame.trees:
            bit = (entry - visible).clamp(0, 63)
            allowed |= ((batch.mask[self._take, None] >> bit) & 1).bool()
        if window is not None:
            allowed &= batch.positions[self._take, None] - self._positions(entry)[:, None] < window
        return allowed

    def _positions(self, entry: Tensor) -> Tensor:
        """Return the positions of cache entries, ``[S, entries]`` or ``[1, entries]``; tree nodes count by depth."""
        if not self._frame.trees:
            return entry[None]
        batch, first = self._batch, self._starts[:-1, None]
        offset = entry - batch.write_at.long()[first]  # 0 is the first entry of this batch
        row = torch.minimum(first + offset.clamp(min=0), self._starts[1:, None] - 1)
        return torch.where(offset < 0, entry, batch.positions[row])


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: AttentionShape) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=heads.scale)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: AttentionShape) -> Tensor:
    """Attention with soft-capped products, which stock attention lacks.

    Args:
        q: ``[..., Hkv, n, D]``, also the shape of the result.
        k, v: ``[..., Hkv, length, D]``.
        mask: added to the capped products.
    """
    assert heads.softcap is not None
    products = torch.tanh(q @ k.mT * (heads.scale / heads.softcap)) * heads.softcap
    if mask is not None:
        products = products + mask
    return products.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
