"""A language model with a paged KV cache behind the ``Model`` protocol, whoever computes its forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cospec.models.cache import KVCache
from cospec.models.packed import PackedBatch, check
from cospec.protocols import Pages
from cospec.types import Commit, Pick, Rolled, TokenBatch

Score = Callable[[PackedBatch], Tensor]
"""Float32 logits ``[R, V]`` of a batch; writes its keys and values behind each sequence's start."""
Roll = Callable[[PackedBatch, Sequence[Pick], int], Rolled]
"""A forward's own loop over a batch that reaches far enough ahead, see ``Model.rollout``."""


class PackedModel:
    """Joins a forward pass and the cache it runs on.

    Args:
        score: the forward pass, on the device of ``cache``.
        vocab_size: columns of the logits.
        max_len: tokens of one sequence.
        roll: the forward's own loop of choosing and feeding, where it has one.
    """

    def __init__(
        self, name: str, score: Score, cache: KVCache, vocab_size: int, max_len: int, roll: Roll | None = None
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.max_len = max_len
        self.dtype = cache.layers[0].keys.dtype
        self.cache = cache
        self.pages: Pages = cache.pages
        self._score, self._roll = score, roll

    @torch.no_grad()
    def forward(self, batch: TokenBatch) -> Tensor:
        """Logits ``[R, V]``, float32, see ``Model.forward``.

        Raises:
            InvalidInput: a token id or a length outside what the model takes.
            ValueError: no room was reserved.
        """
        check(batch, self.vocab_size, self.max_len)
        return self._score(self.cache.pack(batch))

    def rollout(self, batch: TokenBatch, picks: Sequence[Pick], depth: int) -> Rolled | None:
        """Choose and feed ``depth`` tokens of each segment, see ``Model.rollout``."""
        if self._roll is None:
            return None
        check(batch, self.vocab_size, self.max_len + 1 - depth)
        return self._roll(self.cache.pack(batch, ahead=depth - 1), picks, depth)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes, see ``KVCache.commit``."""
        self.cache.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self.cache.free(ids)
