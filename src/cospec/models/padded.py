"""Stock attention of several sequences in one call, all padded to the same number of rows and cache entries.

Everything is computed from tensors on the device of the batch; sizes alone are Python numbers. So the same steps can
be recorded once and repeated with other contents, as CUDA graphs do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from cospec.models.cache import LayerPages
from cospec.models.packed import PackedBatch, Span

if TYPE_CHECKING:
    from cospec.models.attention import Heads

# Products of a query with a key, per sequence, that padding may waste before it costs more than a call of its own.
# Measured with 8 to 32 heads on one CPU core; on a GPU the launches that are saved are dearer still.
WASTE_PER_CALL = 256


@dataclass(frozen=True, slots=True)
class Frame:
    """The sizes that sequences are padded to.

    Attributes:
        rows: of each sequence in the batch.
        entries: of each sequence in the cache.
        trees: whether rows may be nodes of branching trees.
    """

    rows: int
    entries: int
    trees: bool = False


def frame_of(spans: Sequence[Span]) -> Frame:
    """The smallest frame that holds all sequences, in entries a multiple of 8, which GPU kernels want."""
    return Frame(
        rows=max(span.rows for span in spans),
        entries=-(-max(span.length for span in spans) // 8) * 8,
        trees=any(span.tree for span in spans),
    )


def worthwhile(spans: Sequence[Span], frame: Frame) -> bool:
    """Whether one padded call beats a call per sequence: several sequences whose padding wastes little work."""
    wasted = len(spans) * frame.rows * frame.entries - sum(span.rows * span.length for span in spans)
    return len(spans) > 1 and wasted <= WASTE_PER_CALL * len(spans)


class Padded:
    """The attention of one batch, prepared once and called once per layer, see ``LayerAttend``.

    What lies beyond a sequence's own rows and entries repeats its last ones, so that nothing else is ever read.
    """

    def __init__(self, batch: PackedBatch, frame: Frame) -> None:
        self._batch, self._frame = batch, frame
        size = batch.page_size
        self._segment, self._starts = batch.row_segment.long(), batch.starts.long()
        at = batch.write_at.long()
        self._page, self._slot = batch.tables[self._segment, at // size].long(), at % size
        last = self._starts[1:] - 1
        self._take = torch.minimum(self._starts[:-1, None] + self._count(frame.rows), last[:, None])
        entry = torch.minimum(self._count(frame.entries), at[last, None])
        self._from_page, self._from_slot = batch.tables.long().gather(1, entry // size), entry % size
        self._back = self._segment * frame.rows + self._count(at.shape[0]) - self._starts[self._segment]
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}
        self._found: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, pages: LayerPages, heads: Heads) -> Tensor:
        pages.keys[self._page, :, self._slot] = keys
        pages.values[self._page, :, self._slot] = values
        (total, count, dim), rows = queries.shape, self._frame.rows
        shared = keys.shape[1]
        group = count // shared
        # The queries that share keys become rows of the same head.
        q = queries if rows == 1 else queries[self._take].flatten(0, 1)
        q = q.view(-1, rows, shared, group, dim).permute(0, 2, 3, 1, 4).reshape(-1, shared, group * rows, dim)
        k, v = self._entries(pages.keys), self._entries(pages.values)
        product = _plain if heads.softcap is None else capped
        result = product(q, k, v, self._mask(heads.window, group, q.dtype), heads)
        result = result.unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4).reshape(-1, count, dim)
        return result if rows == 1 else result[self._back]

    def _count(self, end: int) -> Tensor:
        return torch.arange(end, device=self._starts.device)

    def _entries(self, pages: Tensor) -> Tensor:
        """Keys or values ``[S, Hkv, entries, D]``, by the numbers of their rows in memory: the fastest gather."""
        dim = pages.shape[-1]
        strides = pages.shape[1], *(step // dim for step in pages.stride()[:3])
        if strides not in self._found:
            count, per_page, per_head, per_slot = strides
            at = self._from_page * per_page + self._from_slot * per_slot
            self._found[strides] = at[:, None] + self._count(count)[:, None] * per_head
        return F.embedding(self._found[strides], pages.as_strided((pages.numel() // dim, dim), (dim, 1)))

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """What is added to the products, 0 or minus infinity: ``[S, 1, group * rows, entries]``."""
        key = window, group, dtype
        if key not in self._masks:
            allowed = self._allowed(window).repeat(1, group, 1)[:, None]
            zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            self._masks[key] = zeros.masked_fill_(~allowed, float("-inf"))
        return self._masks[key]

    def _allowed(self, window: int | None) -> Tensor:
        """Who attends what, bool ``[S, rows, entries]``."""
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
        """Of cache entries in their sequences, ``[S, entries]`` or ``[1, entries]``: nodes of trees stand by depth."""
        if not self._frame.trees:
            return entry[None]
        batch, first = self._batch, self._starts[:-1, None]
        behind = entry - batch.write_at.long()[first]  # 0 is the first entry of this batch
        row = torch.minimum(first + behind.clamp(min=0), self._starts[1:, None] - 1)
        return torch.where(behind < 0, entry, batch.positions[row])


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: Heads) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=heads.scale)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    """Attention with soft-capped products, which stock attention does not offer.

    Args:
        q: ``[..., Hkv, n, D]``; the result is of the same shape.
        k, v: ``[..., Hkv, length, D]``.
        mask: added to the capped products.
    """
    assert heads.softcap is not None
    products = torch.tanh(q @ k.mT * (heads.scale / heads.softcap)) * heads.softcap
    if mask is not None:
        products = products + mask
    return products.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
