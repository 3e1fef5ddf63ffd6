"""The packed batch: the concatenated tokens of all sequences, and the data that separates the sequences in attention.

A *row* is one token of the batch. Known tokens and chain drafts attend a prefix of their sequence's cache, up to
themselves. A node of a branching tree attends the known prefix and its ancestors, given by a bit mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.tree import ancestor_bits, depths, is_chain
from cospec.errors import InvalidInput

ALIGNMENT = 16  # bytes; Triton compiles a kernel again for an address that is aligned otherwise

Tables = Mapping[str, Sequence[int]] | Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The rows of one sequence, for back ends that loop over sequences in Python.

    Attributes:
        first, rows: the rows are ``first .. first + rows - 1``.
        start: cache index of the first row; after the write the cache holds ``start + rows`` entries.
        pages: the pages of those entries, in order.
        tree: whether some rows are nodes of a branching tree.
    """

    first: int
    rows: int
    start: int
    pages: tuple[int, ...]
    tree: bool

    @property
    def length(self) -> int:
        """Number of cache entries after this batch."""
        return self.start + self.rows


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Tensors of a batch with ``T`` rows from ``S`` sequences, ``R`` of which get logits.

    Attributes:
        ids: int64 ``[T]``.
        positions: int64 ``[T]``, position in the sequence; tree nodes count by depth.
        row_segment: int32 ``[T]``, the sequence of each row.
        visible: int32 ``[T]``, number of leading cache entries that a row attends.
        mask: int64 ``[T]``; bit ``j`` lets the row attend cache entry ``visible + j``. 0 for causal rows.
        tables: int32 ``[S, max_pages]``, pages of each sequence; unused entries are 0.
        starts: int32 ``[S + 1]``, first row of each sequence.
        write_at: int32 ``[T]``, cache entry of the row's keys and values.
        logit_rows: int64 ``[R]``.
        page_size: cache entries per page.
        spans: ``[S]``, the same data on the host.
        columns: the memory of all tensors, on the host too.
    """

    ids: Tensor
    positions: Tensor
    row_segment: Tensor
    visible: Tensor
    mask: Tensor
    tables: Tensor
    starts: Tensor
    write_at: Tensor
    logit_rows: Tensor
    page_size: int
    spans: tuple[SequenceSpan, ...]
    columns: Columns

    @property
    def host_ids(self) -> bool:
        """Whether the host knows ``ids``."""
        return self.ids is self.columns.tensors["ids"]

    def with_ids(self, ids: Tensor) -> InputBatch:
        """Return the batch with other ids, int64 ``[T]``, which only the device knows."""
        return replace(self, ids=ids)


class Columns:
    """The tensors of one batch in one block of memory, so that a batch reaches a device in one transfer.

    Args:
        rows, sequences, pages, outputs: ``T``, ``S``, the columns of ``tables``, and ``R`` of an ``InputBatch``.

    Attributes:
        arrays: on the host, by name. Contents are undefined until they are written.
        tensors: on the device, after ``send``; on a CPU they share the memory of ``arrays``.
    """

    def __init__(self, rows: int, sequences: int, pages: int, outputs: int, device: torch.device) -> None:
        wide, narrow = np.dtype(np.int64), np.dtype(np.int32)
        fields: dict[str, tuple[Any, tuple[int, ...]]] = {
            "ids": (wide, (rows,)),
            "positions": (wide, (rows,)),
            "mask": (wide, (rows,)),
            "logit_rows": (wide, (outputs,)),
            "row_segment": (narrow, (rows,)),
            "visible": (narrow, (rows,)),
            "write_at": (narrow, (rows,)),
            "starts": (narrow, (sequences + 1,)),
            "tables": (narrow, (sequences, pages)),
        }
        sizes = [kind.itemsize * prod(shape) for kind, shape in fields.values()]
        *offsets, total = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        self._host = np.empty(total, np.uint8)
        source = torch.from_numpy(self._host)
        self._source, self._target = source, source if device.type == "cpu" else torch.empty_like(source, device=device)
        self.arrays: dict[str, NDArray[Any]] = {}
        self.tensors: dict[str, Tensor] = {}
        for (name, (kind, shape)), size, offset in zip(fields.items(), sizes, offsets, strict=True):
            self.arrays[name] = self._host[offset : offset + size].view(kind).reshape(shape)
            dtype = torch.int64 if kind is wide else torch.int32
            self.tensors[name] = self._target[offset : offset + size].view(dtype).view(shape)

    def send(self) -> None:
        """Copy the arrays to the device. The arrays may change when the call has returned."""
        if self._target is not self._source:
            self._target.copy_(self._source, non_blocking=True)


class _Rows:
    """Columns of a batch under construction."""

    __slots__ = ("ids", "logit_rows", "mask", "positions", "row_segment", "spans", "visible", "write_at")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.row_segment: list[int] = []
        self.visible: list[int] = []
        self.mask: list[int] = []
        self.write_at: list[int] = []
        self.logit_rows: list[int] = []
        self.spans: list[SequenceSpan] = []

    def add(self, part: SequenceSlice, pages: tuple[int, ...]) -> None:
        first, start, count = len(self.ids), part.start, len(part.tokens)
        tree = not is_chain(part.parents)
        causal = part.known if tree else count
        self.ids += part.tokens
        self.positions += range(start, start + causal)
        self.visible += range(start + 1, start + causal + 1)
        self.mask += [0] * causal
        if tree:
            known = start + causal
            self.positions += [known - 1 + depth for depth in depths(part.parents)]
            self.visible += [known] * (count - causal)
            self.mask += ancestor_bits(part.parents)
        self.write_at += range(start, start + count)
        self.row_segment += [len(self.spans)] * count
        self.logit_rows += range(first + part.logits_from, first + count)
        self.spans.append(SequenceSpan(first, count, start, pages, tree))


def pack(batch: TokenBatch, tables: Tables, page_size: int, device: torch.device, ahead: int = 0) -> InputBatch:
    """Pack ``batch`` for one forward pass.

    Args:
        tables: returns the pages of a sequence by id.
        ahead: tokens after each slice that the page tables must cover too.

    Raises:
        ValueError: a sequence has too few reserved pages, or a parent list is no tree.
    """
    lookup = tables if callable(tables) else tables.__getitem__
    rows = _Rows()
    for part in batch.slices:
        needed = -(-(part.start + len(part.tokens) + ahead) // page_size)
        pages = tuple(lookup(part.id)[:needed])
        if len(pages) < needed:
            raise ValueError(f"sequence {part.id} needs {needed} pages and has {len(pages)} reserved")
        rows.add(part, pages)
    spans = rows.spans
    columns = Columns(len(rows.ids), len(spans), max(len(span.pages) for span in spans), len(rows.logit_rows), device)
    arrays = columns.arrays
    for name in ("ids", "positions", "row_segment", "visible", "write_at", "logit_rows"):
        arrays[name][:] = getattr(rows, name)
    arrays["mask"].view(np.uint64)[:] = rows.mask  # the 64th bit becomes the sign
    arrays["starts"][:] = [*(span.first for span in spans), len(rows.ids)]
    arrays["tables"].fill(0)
    for number, span in enumerate(spans):
        arrays["tables"][number, : len(span.pages)] = span.pages
    columns.send()
    return InputBatch(**columns.tensors, page_size=page_size, spans=tuple(spans), columns=columns)


def check(batch: TokenBatch, vocab_size: int, max_len: int) -> None:
    """Refuse a batch that would corrupt the cache or read outside a table.

    Raises:
        InvalidInput: a token id is outside the vocabulary, or a sequence is too long for the model.
        ValueError: a batch or a part is empty, an error of the caller.
    """
    if not batch.slices:
        raise ValueError("a batch needs at least one part")
    for part in batch.slices:
        tokens = part.tokens
        if not tokens or not 0 <= part.logits_from <= len(tokens) or part.known < 0 or part.start < 0:
            raise ValueError(f"part of sequence {part.id} is empty or inconsistent: {part}")
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= vocab_size:
            raise InvalidInput("token id", low if low < 0 else high, f"0 to {vocab_size - 1}")
        length = part.start + part.known + max(depths(part.parents), default=0)
        if length > max_len:
            raise InvalidInput("sequence length", length, f"at most {max_len} tokens, drafts included")
