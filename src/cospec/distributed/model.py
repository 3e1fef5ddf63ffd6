"""A target whose layers run in other processes, as a ``Model``. The engine's process has its page accounting alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cospec.core.interfaces import NativeForward
from cospec.core.model_io import RolloutOutput, RolloutParams, TokenBatch
from cospec.core.types import Commit
from cospec.distributed.pipeline import Pipeline, WindowFuture
from cospec.distributed.stage_sampling import draws_of
from cospec.models.block_manager import BlockPool
from cospec.models.input_batch import check
from cospec.models.kv_cache import accepted_moves
from cospec.models.stage import StageBatch


class ShardedModel:
    """Implements ``interfaces.PipelinedModel``.

    Args:
        name: of the model.
        pages: the accounting of all stages' KV caches, which have equally many pages.
        vocab_size: columns of the logits.
        max_len: tokens of one sequence.
        max_in_flight: windows that are in the stages at the same time.
    """

    dtype = torch.float32
    device = torch.device("cpu")  # of the logits
    hidden_states: Tensor | None = None
    has_rollout = False
    native_forward: NativeForward | None = None

    def __init__(
        self, name: str, pipeline: Pipeline, pages: BlockPool, sizes: tuple[int, int], max_in_flight: int
    ) -> None:
        self.name, self.pipeline, self.max_in_flight = name, pipeline, max_in_flight
        self.pages: BlockPool = pages
        self.vocab_size, self.max_len = sizes
        self._sources: list[int] = []
        self._targets: list[int] = []

    @property
    def pipelined_model(self) -> ShardedModel:
        """See ``Model.pipelined_model``."""
        return self

    def submit(self, batch: TokenBatch) -> WindowFuture:
        """Send a batch through the stages; the last stage draws the tokens of slices that have ``sampling``.

        Raises:
            InvalidInput: a token id or a length is out of the model's range.
            ValueError: no pages were reserved.
            VerifierLost: the stages are lost.
        """
        check(batch, self.vocab_size, self.max_len)
        flat = StageBatch.of(batch, self.pages.table)
        moves = np.array(self._sources, np.int64), np.array(self._targets, np.int64)
        self._sources, self._targets = [], []
        return self.pipeline.submit(flat, moves, draws_of(batch))

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return logits ``[R, V]``, see ``Model.forward``; no other window passes the last stage meanwhile."""
        return self.submit(batch).result().logits

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """See ``Model.rollout``."""
        raise NotImplementedError("``has_rollout`` is False")

    def commit(self, commits: Sequence[Commit]) -> None:
        """Note where accepted nodes move to; the next window's header carries the moves."""
        sources, targets = accepted_moves(commits, self.pages)
        self._sources += sources
        self._targets += targets

    def free(self, ids: Sequence[str]) -> None:
        """Free the pages of sequences. Unknown ids are ignored."""
        for id in ids:
            self.pages.free(id)
