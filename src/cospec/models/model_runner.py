"""A language model with a paged KV cache: joins any forward with the ``Model`` interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cospec.core.interfaces import BlockManager, Model, NativeForward
from cospec.core.model_io import RolloutOutput, RolloutParams, SequenceSlice, TokenBatch
from cospec.core.sampling import likeliest
from cospec.core.types import Commit
from cospec.errors import ModelError
from cospec.models.input_batch import InputBatch, check
from cospec.models.kv_cache import KVCache
from cospec.models.torch_rollout import TorchRollout

Score = Callable[[InputBatch], Tensor]
"""Float32 logits ``[R, V]`` of a batch; writes its keys and values after each sequence's start."""
Read = Callable[[InputBatch], tuple[Tensor, Tensor]]
"""Like ``Score``, with the float32 states ``[R, hidden]``, after the last norm."""
SMOKE_TEST = "smoke-test"  # id of the sequence of ``check_numbers``


@dataclass(frozen=True, slots=True)
class Forwards:
    """The entry points of one model's forward pass.

    Attributes:
        read: set if some component needs the hidden states of every pass.
        native_forward: the native forward, if one exists.
    """

    score: Score
    read: Read | None = None
    native_forward: NativeForward | None = None


class ModelRunner:
    """Joins a forward pass and its cache.

    Args:
        forwards: the forward pass on the device of ``cache``, with its variants.
        vocab_size: columns of the logits.
        max_len: tokens of one sequence.
    """

    def __init__(self, name: str, forwards: Forwards, cache: KVCache, vocab_size: int, max_len: int) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.max_len = max_len
        self.dtype, self.device = cache.dtype, cache.device
        self.cache = cache
        self.pages: BlockManager = cache.pages
        self.hidden_states: Tensor | None = None
        self._forwards = forwards
        self._rollout: Callable[[TokenBatch, Sequence[RolloutParams]], RolloutOutput] | None = None
        if forwards.native_forward is not None:
            self._rollout = forwards.native_forward.rollout
        elif self.device.type != "cpu":  # on a CPU a rollout in torch is no faster than single steps
            self._rollout = TorchRollout(forwards.score, cache, vocab_size, max_len)

    @property
    def native_forward(self) -> NativeForward | None:
        """The native forward; None if missing, or if a component reads the states."""
        return self._forwards.native_forward if self._forwards.read is None else None

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return logits ``[R, V]``, float32, see ``Model.forward``.

        Raises:
            InvalidInput: a token id or a length is out of the model's range.
            ValueError: no pages were reserved.
        """
        native_forward = self.native_forward
        return self._scored(batch) if native_forward is None else native_forward.score(batch)

    @torch.no_grad()
    def _scored(self, batch: TokenBatch) -> Tensor:
        """Compute the logits of a packed batch."""
        check(batch, self.vocab_size, self.max_len)
        packed = self.cache.pack(batch)
        if self._forwards.read is None:
            return self._forwards.score(packed)
        logits, self.hidden_states = self._forwards.read(packed)
        return logits

    @property
    def has_rollout(self) -> bool:
        """See ``Model.has_rollout``."""
        return self._rollout is not None

    @property
    def pipelined_model(self) -> None:
        """A batch is computed in the call."""
        return None

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """Choose and feed tokens of each slice, see ``Model.rollout``."""
        assert self._rollout is not None, "``has_rollout`` was not asked"
        return self._rollout(batch, params)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes, see ``KVCache.commit``."""
        self.cache.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Free sequences. Unknown ids are ignored."""
        self.cache.free(ids)


def check_numbers(model: Model, name: str) -> None:
    """Score two tokens after loading, to find damaged weights. A cache without space for two tokens skips the check.

    Raises:
        ModelError: the logits are NaN.
    """
    tokens = (0, 1 % model.vocab_size)
    model.pages.open_sequence(SMOKE_TEST, ())
    try:
        if not model.pages.allocate(SMOKE_TEST, len(tokens)):
            return
        rows = model.forward(TokenBatch((SequenceSlice(SMOKE_TEST, 0, tokens),)))
    finally:
        model.free([SMOKE_TEST])
    if None in likeliest(rows):
        raise ModelError(f"The model {name} gives logits that are not numbers; its weights are damaged or overflow.")
