"""Steps of decoding and verification as CUDA graphs: one launch instead of the hundreds that dominate a small step.

A batch with few rows per sequence is copied into tensors of fixed size, whose forward was captured once. Sizes are
powers of two. Copies of each sequence's last row, and of the last sequence, pad the batch. The copies repeat the row's
computation and writes, so they need no pages, and their logits are dropped. All other batches run without graphs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cospec.models.attention.backend import AttentionBackend, LayerAttend
from cospec.models.input_batch import Columns, InputBatch, SequenceSpan
from cospec.models.kv_cache import KVCache, LayerBlocks

MAX_SEGMENTS = 64  # sequences, and
MAX_ROWS = 16  # rows of each: larger batches gain nothing, because computation outweighs launches
MIN_ENTRIES = 256
# Of the root mean square of differences, relative to that of the logits. Captured and eager steps add in different
# orders: with random weights of 36 layers in bfloat16 the difference is 0.05. A step that reads wrong entries of the
# cache differs by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}

_CAPTURE = threading.Lock()  # torch captures one graph at a time
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
    """The size of a captured batch: number of sequences, pages and rows of each."""

    slices: int
    pages: int
    rows: int = 1


def graph_shape_of(batch: InputBatch, most_entries: int) -> GraphShape | None:
    """Return the smallest shape for ``batch``; None if the batch is too big.

    Args:
        most_entries: ``AttentionBackend.capture_entries``.
    """
    count, rows = len(batch.spans), max(span.rows for span in batch.spans)
    if count > MAX_SEGMENTS or rows > MAX_ROWS:
        return None
    fewest = -(-MIN_ENTRIES // batch.page_size)
    pages = _power_of_two(max(batch.tables.shape[1], fewest))
    bucket = GraphShape(_power_of_two(count), pages, _power_of_two(rows))
    return bucket if bucket.slices * bucket.pages * batch.page_size <= most_entries else None


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


class StaticBatch:
    """A batch of fixed size, which a captured step reads; ``fill`` replaces its contents by one transfer.

    Args:
        shape: the size.

    Attributes:
        batch: without spans, because the captured step does not know its contents.
    """

    def __init__(self, shape: GraphShape, page_size: int, device: torch.device) -> None:
        self._shape, count = shape, shape.slices * shape.rows
        self._columns = Columns(count, shape.slices, shape.pages, count, device)
        arrays = self._columns.arrays
        arrays["row_segment"][:] = np.arange(count) // shape.rows
        arrays["starts"][:] = np.arange(0, count + 1, shape.rows)
        arrays["tables"].fill(0)
        self.batch = InputBatch(**self._columns.tensors, page_size=page_size, spans=(), columns=self._columns)

    def fill(self, batch: InputBatch) -> None:
        """Copy ``batch``. The first ``R`` logits of the step are those of ``batch``.

        Table entries beyond those of ``batch`` keep old values, which no row attends.
        """
        theirs, arrays, spans = batch.columns.arrays, self._columns.arrays, batch.spans
        rows, width = sources(spans, self._shape), theirs["tables"].shape[1]
        for name in ("ids", "positions", "visible", "mask", "write_at"):
            np.take(theirs[name], rows, out=arrays[name])
        arrays["tables"][: len(spans), :width] = theirs["tables"]
        arrays["tables"][len(spans) :, :width] = theirs["tables"][-1]
        wanted = places(spans, self._shape)[theirs["logit_rows"]]
        arrays["logit_rows"][: len(wanted)] = wanted
        arrays["logit_rows"][len(wanted) :] = 0
        self._columns.send()
        if not batch.host_ids:
            torch.index_select(
                batch.ids, 0, torch.from_numpy(rows).to(batch.ids.device, non_blocking=True), out=self.batch.ids
            )


def sources(spans: Sequence[SequenceSpan], shape: GraphShape) -> NDArray[np.int64]:
    """Return the row that each row of a batch of size ``shape`` copies, from a batch with these spans."""
    first, last = np.array([[span.first, span.first + span.rows - 1] for span in spans]).T
    segment = np.minimum(np.arange(shape.slices), len(spans) - 1)
    found: NDArray[np.int64] = np.minimum(first[segment, None] + np.arange(shape.rows), last[segment, None])
    return found.ravel()


def places(spans: Sequence[SequenceSpan], shape: GraphShape) -> NDArray[np.int64]:
    """Return the row of a batch of size ``shape`` that holds each row of a batch with these spans."""
    found = [shape.rows * number + np.arange(span.rows) for number, span in enumerate(spans)]
    return np.concatenate(found)


def step_of(stepper: CapturableForward, static: InputBatch, layers: Sequence[LayerBlocks]) -> Step:
    """Return the forward of a fixed-size batch, which reads all contents from tensors."""
    return lambda: stepper.run(static, layers, stepper.attention.capture(static))


@cache
def _warm_stream() -> torch.cuda.Stream:
    """Return the stream of the steps before captures; torch has few streams, which it hands out in turn."""
    return torch.cuda.Stream()


class CudaRecorder:
    """Captures the steps of one model as CUDA graphs with one shared memory pool.

    Work memory of cuBLAS belongs to a stream, and a captured product keeps its address. So graphs that were captured
    on one stream must not run at the same time, and two models do. Therefore the captures have a stream of their own.
    Nothing ran on it before, so that its work memory is allocated during a capture, in the graphs' pool. Other memory
    can be freed under a graph: compiled code of torch frees all work memory before and after its own captures.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # torch has no public name for the type
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, step: Step) -> Step:
        with _CAPTURE:
            return self._capture(step)

    def _capture(self, step: Step) -> Step:
        warm, self._stream = _warm_stream(), self._stream or torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            step()  # libraries initialise themselves at their first call, which cannot be captured
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class GraphRunner:
    """A forward whose small steps are captured at first use, once per shape.

    The first result of a graph is compared with the eager result. If the results differ or the capture fails, one
    warning is logged, and all later batches run eagerly.

    Args:
        stepper: the forward.
        record: captures a step.
    """

    def __init__(self, stepper: CapturableForward, record: Record) -> None:
        self._stepper, self._record = stepper, record
        self._recorded: dict[GraphShape, tuple[StaticBatch, Step]] = {}
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
            if not len(batch.logit_rows):  # nothing to compare with
                return self._stepper.logits(batch, layers)
            return self._first(bucket, batch, layers)
        static, replay = self._recorded[bucket]
        static.fill(batch)
        return replay()[: len(batch.logit_rows)].clone()  # the next replay writes to the same memory

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """See ``FusedLlama.states``. Never captured: a captured step returns one tensor."""
        return self._stepper.states(batch, layers)

    def on(self, cache: KVCache, max_len: int) -> None:
        """Return None: captured forwards use torch."""

    def _first(self, bucket: GraphShape, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """Capture, compare with the eager result, and return the eager result."""
        ordinary = self._stepper.logits(batch, layers)
        static = StaticBatch(bucket, batch.page_size, batch.ids.device)
        try:
            static.fill(batch)
            replay = self._record(step_of(self._stepper, static.batch, layers))
            found = replay()[: len(batch.logit_rows)]
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
    difference, size = (float(x.square().mean().sqrt()) for x in (found - wanted, wanted))
    return "" if difference <= tolerance * size else f"its logits differ by {difference:.2g} of {size:.2g}"
