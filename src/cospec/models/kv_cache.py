"""The KV cache: keys and values of all sequences, in pages, outside the model.

A sequence's entry ``i`` is in page ``table[i // page_size]`` at slot ``i % page_size``. The pool assigns pages to
sequences; this module holds the tensors. Entries after a sequence's computed tokens are overwritten. Therefore commit
and rollback of a chain copy nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from cospec.core.interfaces import BlockManager
from cospec.core.model_io import TokenBatch
from cospec.core.types import Commit
from cospec.models.input_batch import InputBatch, pack
from cospec.models.kv_cache_formats import encode, entry_width
from cospec.native.operators import one_torch_thread, zeros

Tables = Callable[[str], Sequence[int]]
"""The pages of a sequence in order."""


class BlockTables(BlockManager, Protocol):
    """A page pool that returns the pages of a sequence."""

    page_size: int
    num_pages: int

    def table(self, id: str) -> array[int]:
        """Return the pages of a sequence in order, int32.

        Raises:
            KeyError: the sequence has no pages.
        """


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key/value heads of one attention layer, and the size of a head."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """Keys and values of one layer, entries ``[pages, heads, page_size, W]``, see ``kv_cache_dtype``."""

    keys: Tensor
    values: Tensor

    def write(self, page: Tensor, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values ``[T, Hkv, D]`` of ``T`` tokens to their pages and slots, int64 ``[T]``."""
        self.keys[page, :, slot] = encode(keys, self.keys.dtype)
        self.values[page, :, slot] = encode(values, self.values.dtype)


def block_bytes(shapes: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page over all layers, keys and values together."""
    return sum(2 * shape.heads * entry_width(shape.dim, dtype) for shape in shapes) * page_size * dtype.itemsize


class KVCache:
    """Preallocated keys and values of one model.

    Args:
        shapes: one per attention layer, in the order of their calls.
        pages: the page pool.
        dtype: of the entries, one of ``kv_cache_formats.CACHE_DTYPES``.
        by_head: store the pages of a head contiguously, so that adjacent pages are one view for stock attention.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        pages: BlockTables,
        dtype: torch.dtype,
        device: torch.device,
        by_head: bool = False,
    ) -> None:
        self.pages = pages
        self.dtype, self.device = dtype, device

        def allocate(shape: LayerShape, layers: int) -> Tensor:
            """Return keys and values of layers of one shape, ``[2 * layers, pages, heads, page_size, W]``."""
            width = entry_width(shape.dim, dtype)
            outer = (shape.heads, pages.num_pages) if by_head else (pages.num_pages, shape.heads)
            size = (2 * layers, *outer, pages.page_size, width)
            made = zeros(size, dtype) if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)
            return made.transpose(1, 2) if by_head else made

        counts = Counter(shapes)
        self._entries = {shape: allocate(shape, count) for shape, count in counts.items()}
        free = {shape: iter(entries.unbind()) for shape, entries in self._entries.items()}
        self.layers = tuple(LayerBlocks(next(free[shape]), next(free[shape])) for shape in shapes)
        CACHES.add(self)

    @property
    def memory(self) -> list[tuple[int, int]]:
        """Address and bytes of the keys, or of the values, of each layer."""
        parts = (part for entries in self._entries.values() for part in entries.unbind())
        return [(part.data_ptr(), part.numel() * part.element_size()) for part in parts]

    def pack_with(self, batch: TokenBatch, tables: Mapping[str, Sequence[int]]) -> InputBatch:
        """Pack ``batch`` with page tables that another process assigned."""
        return pack(batch, tables, self.pages.page_size, self.device)

    def pack(self, batch: TokenBatch, ahead: int = 0) -> InputBatch:
        """Pack ``batch`` with this cache's page tables, which cover ``ahead`` more tokens."""
        return pack(batch, self.pages.table, self.pages.page_size, self.device, ahead)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Move the entries of accepted nodes to the end of the known tokens, see ``accepted_moves``."""
        self.copy(*accepted_moves(commits, self.pages))

    def move(self, table: Sequence[int], from_indices: Sequence[int], to_indices: Sequence[int]) -> None:
        """Copy entries of one sequence to other places of the sequence; all reads precede all writes."""
        size = self.pages.page_size
        self.copy(_slots(table, from_indices, size), _slots(table, to_indices, size))

    def free(self, ids: Sequence[str]) -> None:
        """Free the pages of sequences. Unknown ids are ignored."""
        for id in ids:
            self.pages.free(id)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy entries between slots of all layers: slot ``s`` is entry ``s % page_size`` of its page."""
        if not sources:
            return
        size = self.pages.page_size
        rows = [zip(*(divmod(slot, size) for slot in slots), strict=True) for slots in (sources, targets)]
        from_page, from_slot, to_page, to_slot = torch.tensor([*rows[0], *rows[1]], device=self.device).unbind()
        with one_torch_thread():
            for entries in self._entries.values():  # one operation for all layers of a shape
                entries[:, to_page, :, to_slot] = entries[:, from_page, :, from_slot]


CACHES: WeakSet[KVCache] = WeakSet()
"""The caches of this process."""


def accepted_moves(commits: Sequence[Commit], pages: BlockTables) -> tuple[list[int], list[int]]:
    """Return the slots that accepted nodes move from and to.

    Node ``i`` of the sequence's last forward is at entry ``base_len + i``. An accepted path that is a prefix of the
    nodes moves nothing; the path of a chain always is a prefix.
    """
    sources: list[int] = []
    targets: list[int] = []
    for commit in commits:
        moved = [(node, place) for place, node in enumerate(commit.path) if node != place]
        if not moved:
            continue
        try:
            table = pages.table(commit.id)
        except KeyError:
            continue  # finished and freed already
        sources += _slots(table, [commit.base_len + node for node, _ in moved], pages.page_size)
        targets += _slots(table, [commit.base_len + place for _, place in moved], pages.page_size)
    return sources, targets


def _slots(table: Sequence[int], indices: Sequence[int], size: int) -> list[int]:
    return [table[index // size] * size + index % size for index in indices]
