"""Attention by Triton kernels, which read the pages in place, on a GPU, or on a CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cospec import triton_support
from cospec.models.attention.backend import AttentionBackend, AttentionShape, LayerAttend
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import LayerBlocks, LayerShape

SMALLEST_TILE = 16  # rows times heads of a matrix product on a GPU
HEAD_BYTES = 608  # shared memory per number of a head in float32, as Triton compiles the kernels for a GPU
MAX_STATES = 1 << 24  # float32 numbers of the states of one launch, 64 MiB


class TritonAttention(AttentionBackend):
    """Two kernels: contexts in parts of fixed length, then the merge of the parts with the nodes of trees."""

    name = "triton"
    by_head = False
    capture_entries = 1 << 20
    automatic = ("cuda",)  # the interpreter serves tests

    def prepare(self, batch: InputBatch) -> LayerAttend:
        """See ``AttentionBackend``."""
        return _Paged(batch, any(span.tree for span in batch.spans), max(span.length for span in batch.spans))

    def capture(self, batch: InputBatch) -> LayerAttend:
        """See ``AttentionBackend``."""
        trees = len(batch.ids) > len(batch.tables)
        return _Paged(batch, trees, longest=batch.tables.shape[1] * batch.page_size)

    def why_not(self, device: torch.device, shapes: Sequence[LayerShape], page_size: int) -> str:
        """See ``AttentionBackend``."""
        if (reason := triton_support.why_not(device)) or device.type == "cpu":
            return reason
        need = HEAD_BYTES * max((_power_of_two(shape.dim) for shape in shapes), default=0)
        if torch.version.hip is not None:  # AMD's GPUs do not name their limit
            return ""
        properties: Any = torch.cuda.get_device_properties(device)
        limit = properties.shared_memory_per_block_optin
        return f"a head needs {need} bytes of shared memory, and the GPU has {limit}" if need > limit else ""


class _Paged:
    """The attention of one batch, prepared once and called once per layer, see ``LayerAttend``."""

    def __init__(self, batch: InputBatch, trees: bool, longest: int) -> None:
        # Triton reads TRITON_INTERPRET at import, and other back ends need no Triton.
        from cospec.models.attention import triton_kernels

        self._kernels, self._batch, self._trees = triton_kernels, batch, trees
        self._parts = -(-longest // triton_kernels.PART.value)
        self._tiles: dict[int, Tensor] = {}

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, pages: LayerBlocks, heads: AttentionShape
    ) -> Tensor:
        self._write(keys, values, pages)
        batch, (_, count, dim), shared = self._batch, queries.shape, keys.shape[1]
        group = _power_of_two(count // shared)
        tile, width = max(SMALLEST_TILE, group), max(16, _power_of_two(dim))
        tiles = self._tiles_of(tile // group)
        scaled = pages.keys.dtype is torch.int8
        scales = [x.view(torch.float32) if scaled else x for x in (pages.keys, pages.values)]
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        most = max(1, MAX_STATES // (shared * self._parts * tile * width))
        size = (min(most, len(tiles)), shared, self._parts)
        sums = torch.empty(*size, tile, width, dtype=torch.float32, device=queries.device)
        norms = torch.empty(*size, 2, tile, dtype=torch.float32, device=queries.device)
        common: dict[str, Any] = {
            "queries": queries, "keys": pages.keys, "values": pages.values, "key_scales": scales[0],
            "value_scales": scales[1], "tiles": tiles, "segments": batch.row_segment, "tables": batch.tables,
            "visible": batch.visible, "positions": batch.positions, "sums": sums, "norms": norms,
            "heads": count, "kv_heads": shared, "group": count // shared, "table_step": batch.tables.stride(0),
            "page_size": batch.page_size, "page_step": pages.keys.stride(0), "head_step": pages.keys.stride(1),
            "slot_step": pages.keys.stride(2), "parts": self._parts, "scale": float(heads.scale),
            "softcap": heads.softcap or 0.0, "window": heads.window or 0,
            "DIM": dim, "WIDTH": width, "HEADS": group, "TILE": tile, "SCALED": scaled,
            "enable_fp_fusion": False,  # every rounding is as written
        }  # fmt: skip
        rows = {"masks": batch.mask, "starts": batch.starts, "write_at": batch.write_at, "out": out}
        for first in range(0, len(tiles), most):  # later launches reuse the states
            now = min(most, len(tiles) - first)
            self._kernels.context_kernel[(now, shared, self._parts)](first_tile=first, **common)
            self._kernels.tree_kernel[(now, shared)](first_tile=first, TREES=self._trees, **rows, **common)
        return out

    def _write(self, keys: Tensor, values: Tensor, pages: LayerBlocks) -> None:
        """Write the batch's keys and values to the pages."""
        batch, (rows, count, dim) = self._batch, keys.shape
        if pages.keys.dtype is torch.int8:  # encoded by torch
            pages.write(*self._places, keys, values)
            return
        keys, values = (x.to(pages.keys.dtype) for x in (keys, values))
        keys, values = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (keys, values))
        self._kernels.write_kernel[(rows, count)](
            keys, values, pages.keys, pages.values, batch.row_segment, batch.tables, batch.write_at, keys.stride(0),
            values.stride(0), batch.tables.stride(0), batch.page_size, *pages.keys.stride()[:3], DIM=dim,
            WIDTH=_power_of_two(dim), num_warps=1,
        )  # fmt: skip

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """The page and the slot of each row, int64 ``[T]``."""
        batch, at = self._batch, self._batch.write_at.long()
        return batch.tables[batch.row_segment.long(), at // batch.page_size].long(), at % batch.page_size

    def _tiles_of(self, most: int) -> Tensor:
        """Return the tiles of at most so many rows, int32 ``[tiles, 2]``: first row and number of rows."""
        if most not in self._tiles:
            spans, device = self._batch.spans, self._batch.ids.device
            if spans:
                found = [
                    (span.first + row, min(most, span.rows - row))
                    for span in spans
                    for row in range(0, span.rows, most)
                ]
                self._tiles[most] = torch.tensor(found, dtype=torch.int32).to(device, non_blocking=True)
            else:  # a captured batch, which copies nothing from the host
                rows = torch.arange(len(self._batch.ids), dtype=torch.int32, device=device)
                first = rows.view(len(self._batch.tables), -1)
                left = (first.shape[1] - rows[: first.shape[1]]).clamp(max=most).expand_as(first)
                self._tiles[most] = torch.stack([first, left], 2)[:, ::most].flatten(0, 1).contiguous()
        return self._tiles[most]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
