"""A tabular model over a tiny vocabulary, in float64: small enough that its whole output law can be enumerated.

The next token depends on the last ``order`` tokens through a table of random logits. It reads those tokens from a
paged cache, as an attention model reads its keys and values, so that a stale entry, a wrong path or a wrong position
changes its output instead of going unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.core.interfaces import NativeForward
from cospec.core.model_io import RolloutOutput, RolloutParams, SequenceSlice, TokenBatch
from cospec.core.tree import path_to
from cospec.core.types import Commit
from cospec.models.block_manager import BlockPool

EMPTY = -1


class ToyModel:
    """Implements ``protocols.Model``.

    Args:
        vocab_size: V.
        order: how many last tokens the next one depends on.
        seed: of the table.
        sharpness: standard deviation of the logits; larger is more decided.
    """

    dtype = torch.float64

    def __init__(self, vocab_size: int = 3, order: int = 2, seed: int = 0, sharpness: float = 1.0) -> None:
        self.name, self.vocab_size, self.order = f"toy-{seed}", vocab_size, order
        self.max_len = 512
        self.pages = BlockPool(num_pages=256, page_size=4)
        shape = [vocab_size + 1] * order + [vocab_size]  # the last index of a context slot stands for "no token"
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(shape, generator=generator, dtype=torch.float64) * sharpness
        self.cells = [[EMPTY] * self.pages.page_size for _ in range(self.pages.num_pages)]
        self.calls = self.rows = 0  # forwards so far, and the tokens that were fed in them
        self.states: Tensor | None = None
        self.direct: NativeForward | None = None
        self.has_rollout = False
        self.device = torch.device("cpu")

    def logits(self, context: Sequence[int]) -> Tensor:
        """Logits ``[V]`` behind ``context``, without any cache: the reference of the tests."""
        padded = [EMPTY] * self.order + list(context)
        return self.table[tuple(padded[len(padded) - self.order :])]

    def forward(self, batch: TokenBatch) -> Tensor:
        """Write the tokens behind ``start``, then read each row's context back from the cache."""
        self.calls += 1
        self.rows += sum(len(segment.tokens) for segment in batch.segments)
        rows = []
        for segment in batch.segments:
            for offset, token in enumerate(segment.tokens):
                self.write(segment.id, segment.start + offset, token)
            rows += [self.logits(self.context(segment, row)) for row in self._rows(segment)]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=self.dtype)

    def rollout(self, batch: TokenBatch, picks: Sequence[RolloutParams]) -> RolloutOutput:
        """Never called: a table has nothing to gain from a loop of its own."""
        raise NotImplementedError

    def commit(self, commits: Sequence[Commit]) -> None:
        """Move accepted nodes together, as a cache of keys and values does."""
        for commit in commits:
            moved = [self.read(commit.id, commit.base_len + node) for node in commit.path]
            for offset, token in enumerate(moved):
                self.write(commit.id, commit.base_len + offset, token)

    def free(self, ids: Sequence[str]) -> None:
        """Give the pages back; what they held stays in them."""
        for id in ids:
            self.pages.free(id)

    @staticmethod
    def _rows(segment: SequenceSlice) -> range:
        return range(segment.logits_from, len(segment.tokens))

    def context(self, segment: SequenceSlice, row: int) -> list[int]:
        """The tokens that a row of a segment attends to, read from the cache."""
        known = segment.start + segment.known
        if segment.start + row < known:
            places = list(range(segment.start + row + 1))
        else:
            node = segment.start + row - known
            places = list(range(known)) + [known + above for above in path_to(segment.parents, node)]
        return [self.read(segment.id, place) for place in places]

    def write(self, id: str, place: int, token: int) -> None:
        """Write the cache entry of a position."""
        page, cell = divmod(place, self.pages.page_size)
        self.cells[self.pages.table(id)[page]][cell] = token

    def read(self, id: str, place: int) -> int:
        """Read the cache entry of a position."""
        page, cell = divmod(place, self.pages.page_size)
        return self.cells[self.pages.table(id)[page]][cell]
