"""Decoding steps as CUDA graphs: one launch instead of the hundreds that dominate a small model's step.

A batch with one row per sequence is copied into tensors of fixed size, whose forward was captured once. Sizes are
powers of two. Copies of the last row pad the batch. The copies repeat the last row's computation and writes, so they
need no pages, and their logits are dropped. All other batches run without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cospec.models.attention.backend import AttentionBackend, LayerAttend
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache, LayerBlocks

MAX_SEGMENTS = 64  # larger batches gain nothing, because computation outweighs launches
MIN_ENTRIES = 256
# Relative to the largest logit: captured and eager steps add in different orders, which shows in half precision.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_log = logging.getLogger(__name__)


class CapturableForward(Protocol):
    """A forward that accepts an attention from outside; ``attention`` is its own."""

    attention: AttentionBackend

    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """Return float32 logits ``[R, V]``; write the batch's keys and values to the pages of each layer."""

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """Return logits like ``logits``, and the float32 states ``[R, hidden]`` before the output layer."""

    def run(self, batch: InputBatch, layers: Sequence[LayerBlocks], attend: LayerAttend) -> Tensor:
        """Like ``logits``, with the given attention."""


Step = Callable[[], Tensor]
Record = Callable[[Step], Step]
"""Returns a function that replays a step on the current contents of its tensors, into the same result tensor."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The size of a captured batch: number of sequences, and pages of each."""

    segments: int
    pages: int


def graph_shape_of(batch: InputBatch, most_entries: int) -> GraphShape | None:
    """Return the smallest shape for ``batch``; None if the batch is too big or has several rows per sequence.

    Args:
        most_entries: ``AttentionBackend.capture_entries``.
    """
    count = len(batch.spans)
    if count > MAX_SEGMENTS or any(span.rows != 1 for span in batch.spans):
        return None
    fewest = -(-MIN_ENTRIES // batch.page_size)
    bucket = GraphShape(_power_of_two(count), _power_of_two(max(batch.tables.shape[1], fewest)))
    return bucket if bucket.segments * bucket.pages * batch.page_size <= most_entries else None


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def blank(bucket: GraphShape, page_size: int, device: torch.device) -> InputBatch:
    """Build an empty batch of fixed size. The batch has no spans, because the host does not know its contents."""
    count = bucket.segments

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return InputBatch(
        ids=zeros(count, dtype=torch.int64),
        positions=zeros(count, dtype=torch.int64),
        row_segment=torch.arange(count, dtype=torch.int32, device=device),
        visible=zeros(count),
        mask=zeros(count, dtype=torch.int64),
        tables=zeros(count, bucket.pages),
        starts=torch.arange(count + 1, dtype=torch.int32, device=device),
        write_at=zeros(count),
        logit_rows=torch.arange(count, device=device),
        page_size=page_size,
        spans=(),
    )


def fill(static: InputBatch, batch: InputBatch) -> None:
    """Copy ``batch`` to the front of ``static``, and its last row to the rest.

    Table entries beyond those of ``batch`` keep old values, which no row attends.
    """
    rows = static.logit_rows.clamp(max=batch.ids.shape[0] - 1)
    for name in ("ids", "positions", "visible", "write_at"):
        torch.index_select(getattr(batch, name), 0, rows, out=getattr(static, name))
    static.tables[:, : batch.tables.shape[1]] = batch.tables[rows]


def step_of(stepper: CapturableForward, static: InputBatch, layers: Sequence[LayerBlocks]) -> Step:
    """Return the forward of a fixed-size batch, which reads all contents from tensors."""
    return lambda: stepper.run(static, layers, stepper.attention.capture(static))


class CudaRecorder:
    """Captures steps as CUDA graphs with one shared memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch has no public name for the type

    def __call__(self, step: Step) -> Step:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # libraries initialise themselves at their first call, which cannot be captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class GraphRunner:
    """A forward whose decoding steps are captured at first use, once per shape.

    The first result of a graph is compared with the eager result. If the results differ or the capture fails, one
    warning is logged, and all later batches run eagerly.

    Args:
        stepper: the forward.
        record: captures a step.
    """

    def __init__(self, stepper: CapturableForward, record: Record) -> None:
        self._stepper, self._record = stepper, record
        self._recorded: dict[GraphShape, tuple[InputBatch, Step]] = {}
        self._layers: Sequence[LayerBlocks] | None = None  # the layers that the graphs write
        self._works = True

    @torch.no_grad()
    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """See ``FusedLlama.logits``."""
        if self._layers is None:
            self._layers = layers
        ready = self._works and layers is self._layers
        bucket = graph_shape_of(batch, self._stepper.attention.capture_entries) if ready else None
        if bucket is None:
            return self._stepper.logits(batch, layers)
        if bucket not in self._recorded:
            return self._first(bucket, batch, layers)
        static, replay = self._recorded[bucket]
        fill(static, batch)
        return replay()[batch.logit_rows]

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """See ``FusedLlama.states``. Never captured: a target with states verifies drafts instead of single tokens."""
        return self._stepper.states(batch, layers)

    def on(self, cache: KVCache, max_len: int) -> None:
        """Return None: captured forwards use torch."""

    def _first(self, bucket: GraphShape, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """Capture, compare with the eager result, and return the eager result."""
        ordinary = self._stepper.logits(batch, layers)
        static = blank(bucket, batch.page_size, batch.ids.device)
        try:
            fill(static, batch)
            replay = self._record(step_of(self._stepper, static, layers))
            found = replay()[batch.logit_rows]
            reason = _difference(found, ordinary, TOLERANCE[layers[0].keys.dtype])
        except RuntimeError as error:  # any device error, out of memory included
            reason = str(error).partition("\n")[0]
        if reason:
            _log.warning("decoding without CUDA graphs because recording one failed: %s", reason)
            self._works = False
            self._recorded.clear()
            # The writes of the failed graph may be wrong, so compute again.
            return self._stepper.logits(batch, layers)
        self._recorded[bucket] = static, replay
        return ordinary


def _difference(found: Tensor, wanted: Tensor, tolerance: float) -> str:
    """Describe the difference of ``found``; empty if within the tolerance."""
    if not wanted.numel():
        return ""
    worst, largest = (float(x.abs().max()) for x in (found - wanted, wanted))
    return "" if worst <= tolerance * largest else f"its logits differ by {worst:.2g} of {largest:.2g}"
