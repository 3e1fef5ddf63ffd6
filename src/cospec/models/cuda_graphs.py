"""Decoding steps as CUDA graphs: one launch instead of hundreds, which is what a small model's step consists of.

A batch with one row per sequence is copied into tensors of fixed size, whose forward was recorded once and is repeated
at a stroke. Sizes are powers of two. Copies of the last row fill up the batch: they compute and write once more what
that row does, so they need no room of their own and their logits are dropped. All other batches run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cospec.models.attention.backends import LayerAttend
from cospec.models.attention.padded_sdpa import MAX_ENTRIES, Frame, Padded
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache, LayerBlocks

MAX_SEGMENTS = 64  # beyond, the work outweighs the launches
MIN_ENTRIES = 256
# Of the largest logit: recorded and ordinary steps add up in other orders, and half precision shows it.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_log = logging.getLogger(__name__)


class CapturableForward(Protocol):
    """A forward that can also run with an attention that is given to it."""

    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """Float32 ``[R, V]``; writes the batch's keys and values to the pages of each layer."""

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """Like ``logits``, with the float32 states ``[R, hidden]`` that the logits were read from."""

    def run(self, batch: InputBatch, layers: Sequence[LayerBlocks], attend: LayerAttend) -> Tensor:
        """Like ``logits``."""


Step = Callable[[], Tensor]
Record = Callable[[Step], Step]
"""Gives a function that repeats a step on what its tensors hold by then, into the same result tensor each time."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The size of a recorded batch: sequences, and pages of each."""

    segments: int
    pages: int


def graph_shape_of(batch: InputBatch) -> GraphShape | None:
    """The smallest bucket for ``batch``; None when it has another pattern than one row per sequence, or is too big."""
    count = len(batch.spans)
    if count > MAX_SEGMENTS or any(span.rows != 1 for span in batch.spans):
        return None
    fewest = -(-MIN_ENTRIES // batch.page_size)
    bucket = GraphShape(_power_of_two(count), _power_of_two(max(batch.tables.shape[1], fewest)))
    return bucket if bucket.segments * bucket.pages * batch.page_size <= MAX_ENTRIES else None


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def blank(bucket: GraphShape, page_size: int, device: torch.device) -> InputBatch:
    """A batch of fixed size to be filled; it has no spans, so that nothing of its contents is known to the host."""
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
    """Copy ``batch`` to the front of ``static`` and its last row to the rest.

    Table entries beyond those of ``batch`` keep what they held: pages that no row attends.
    """
    rows = static.logit_rows.clamp(max=batch.ids.shape[0] - 1)
    for name in ("ids", "positions", "visible", "write_at"):
        torch.index_select(getattr(batch, name), 0, rows, out=getattr(static, name))
    static.tables[:, : batch.tables.shape[1]] = batch.tables[rows]


def step_of(stepper: CapturableForward, static: InputBatch, layers: Sequence[LayerBlocks]) -> Step:
    """The forward of a batch of fixed size: all that it reads of the contents, it reads from tensors."""
    frame = Frame(rows=1, entries=static.tables.shape[1] * static.page_size)
    return lambda: stepper.run(static, layers, Padded(static, frame))


class CudaRecorder:
    """Records steps as CUDA graphs, which share the memory of what they compute on the way."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch has no public name for its type

    def __call__(self, step: Step) -> Step:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # libraries set themselves up at their first call, which cannot be recorded
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class GraphRunner:
    """A forward whose decoding steps are recorded at their first use, once per bucket.

    The first result of a recording is compared with the ordinary one. When they differ or the recording fails, one
    warning is logged and all batches run in the ordinary way from then on.

    Args:
        stepper: the forward.
        record: how a step is recorded.
    """

    def __init__(self, stepper: CapturableForward, record: Record) -> None:
        self._stepper, self._record = stepper, record
        self._recorded: dict[GraphShape, tuple[InputBatch, Step]] = {}
        self._layers: Sequence[LayerBlocks] | None = None  # those that the recordings write
        self._works = True

    @torch.no_grad()
    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """See ``FusedLlama.logits``."""
        if self._layers is None:
            self._layers = layers
        bucket = graph_shape_of(batch) if self._works and layers is self._layers else None
        if bucket is None:
            return self._stepper.logits(batch, layers)
        if bucket not in self._recorded:
            return self._first(bucket, batch, layers)
        static, replay = self._recorded[bucket]
        fill(static, batch)
        return replay()[batch.logit_rows]

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """See ``FusedLlama.states``. Never recorded: a target that is read from verifies drafts, not single tokens."""
        return self._stepper.states(batch, layers)

    def on(self, cache: KVCache, max_len: int) -> None:
        """Recorded forwards use torch."""

    def _first(self, bucket: GraphShape, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """Record, and compare with the ordinary result, which is the one that counts here."""
        ordinary = self._stepper.logits(batch, layers)
        static = blank(bucket, batch.page_size, batch.ids.device)
        try:
            fill(static, batch)
            replay = self._record(step_of(self._stepper, static, layers))
            found = replay()[batch.logit_rows]
            reason = _difference(found, ordinary, TOLERANCE[layers[0].keys.dtype])
        except RuntimeError as error:  # what a device raises, running out of memory included
            reason = str(error).partition("\n")[0]
        if reason:
            _log.warning("decoding without CUDA graphs because recording one failed: %s", reason)
            self._works = False
            self._recorded.clear()
            # What the recording wrote may be wrong as well.
            return self._stepper.logits(batch, layers)
        self._recorded[bucket] = static, replay
        return ordinary


def _difference(found: Tensor, wanted: Tensor, tolerance: float) -> str:
    """What is wrong with ``found``; empty when it is near enough."""
    if not wanted.numel():
        return ""
    worst, largest = (float(x.abs().max()) for x in (found - wanted, wanted))
    return "" if worst <= tolerance * largest else f"its logits differ by {worst:.2g} of {largest:.2g}"
