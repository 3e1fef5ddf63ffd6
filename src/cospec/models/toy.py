"""A tabular float64 model over a tiny vocabulary, small enough to enumerate its output distribution.

The next token depends on the last ``order`` tokens through a table of random logits. The model reads those tokens from
a paged cache, as attention reads keys and values. Therefore a stale entry, a wrong path or a wrong position changes the
output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.core.interfaces import NativeForward, PipelinedModel
from cospec.core.model_io import RolloutOutput, RolloutParams, SequenceSlice, TokenBatch
from cospec.core.tree import path_to
from cospec.core.types import Commit
from cospec.models.block_manager import BlockPool

EMPTY = -1


class ToyModel:
    """Implements ``interfaces.Model``.

    Args:
        vocab_size: V.
        order: number of last tokens that determine the next token.
        seed: of the table.
        sharpness: standard deviation of the logits; larger values are more peaked.
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
        self.calls = self.rows = 0  # number of forwards, and number of tokens in them
        self.hidden_states: Tensor | None = None
        self.native_forward: NativeForward | None = None
        self.has_rollout = False
        self.pipelined_model: PipelinedModel | None = None
        self.device = torch.device("cpu")

    def logits(self, context: Sequence[int]) -> Tensor:
        """Return logits ``[V]`` after ``context``, without a cache: the reference of the tests."""
        padded = [EMPTY] * self.order + list(context)
        return self.table[tuple(padded[len(padded) - self.order :])]

    def forward(self, batch: TokenBatch) -> Tensor:
        """Write the tokens after ``start``, then read each row's context from the cache."""
        self.calls += 1
        self.rows += sum(len(part.tokens) for part in batch.slices)
        rows = []
        for part in batch.slices:
            for offset, token in enumerate(part.tokens):
                self.write(part.id, part.start + offset, token)
            rows += [self.logits(self.context(part, row)) for row in self._rows(part)]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=self.dtype)

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """Never called: a table gains nothing from a native loop."""
        raise NotImplementedError

    def commit(self, commits: Sequence[Commit]) -> None:
        """Move accepted nodes together, like a KV cache."""
        for commit in commits:
            moved = [self.read(commit.id, commit.base_len + node) for node in commit.path]
            for offset, token in enumerate(moved):
                self.write(commit.id, commit.base_len + offset, token)

    def free(self, ids: Sequence[str]) -> None:
        """Free the pages; their contents stay."""
        for id in ids:
            self.pages.free(id)

    @staticmethod
    def _rows(part: SequenceSlice) -> range:
        return range(part.logits_from, len(part.tokens))

    def context(self, part: SequenceSlice, row: int) -> list[int]:
        """Read the last tokens that a row of a slice attends from the cache, at least the ``order`` that count."""
        known = part.start + part.known
        if part.start + row < known:
            length, path = part.start + row + 1, list[int]()
        else:
            node = part.start + row - known
            length, path = known, [known + above for above in path_to(part.parents, node)]
        first = max(length + len(path) - self.order, 0)
        return [self.read(part.id, place) for place in (*range(first, length), *path)]

    def write(self, id: str, place: int, token: int) -> None:
        """Write the cache entry of a position."""
        page, cell = divmod(place, self.pages.page_size)
        self.cells[self.pages.table(id)[page]][cell] = token

    def read(self, id: str, place: int) -> int:
        """Read the cache entry of a position."""
        page, cell = divmod(place, self.pages.page_size)
        return self.cells[self.pages.table(id)[page]][cell]
