"""The forward of a part of a model: states of the layers before in, states or logits out."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache, Tables
from cospec.models.shard import Shard

FIELDS = 5  # of a slice in a ``StageBatch``: start, tokens, draft nodes, first row with logits, pages


@dataclass(frozen=True, slots=True)
class StageBatch:
    """A ``TokenBatch`` with its page tables, as plain arrays.

    Attributes:
        slices: int64 ``[S, FIELDS]``.
        ids: int64 ``[T]``, the tokens of all slices.
        parents: int64 ``[N]``, of the draft nodes of all slices.
        pages: int32 ``[P]``, the page tables of all slices.
    """

    slices: NDArray[np.int64]
    ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    pages: NDArray[np.int32]

    @classmethod
    def of(cls, batch: TokenBatch, tables: Tables) -> StageBatch:
        """Flatten a batch whose sequences have pages."""
        slices, ids, parents, pages = array("q"), array("q"), array("q"), array("i")
        for part in batch.slices:
            table = tables(part.id)
            slices.extend((part.start, len(part.tokens), len(part.parents), part.logits_from, len(table)))
            ids.extend(part.tokens)
            parents.extend(part.parents)
            pages.extend(table)
        return cls(
            np.array(slices, np.int64).reshape(-1, FIELDS), np.array(ids, np.int64), np.array(parents, np.int64),
            np.array(pages, np.int32),
        )  # fmt: skip

    @property
    def logit_rows(self) -> int:
        """Number of rows that get logits."""
        return int((self.slices[:, 1] - self.slices[:, 3]).sum())

    def unpack(self) -> tuple[TokenBatch, Mapping[str, Sequence[int]]]:
        """Return the batch with numbers as ids, and its page tables."""
        parts: list[SequenceSlice] = []
        tables: dict[str, Sequence[int]] = {}
        token = node = page = 0
        for number, (start, tokens, nodes, first, count) in enumerate(self.slices.tolist()):
            own = tuple(self.ids[token : token + tokens].tolist())
            parents = tuple(self.parents[node : node + nodes].tolist())
            parts.append(SequenceSlice(str(number), start, own, parents, first))
            tables[str(number)] = self.pages[page : page + count].tolist()
            token, node, page = token + tokens, node + nodes, page + count
        return TokenBatch(tuple(parts)), tables


class StageForward(Protocol):
    """The forward of a part of a model on the part's own KV cache.

    Attributes:
        cache: keys and values of the part's layers.
    """

    cache: KVCache

    def run(self, batch: StageBatch, states: Tensor | None) -> Tensor | None:
        """Compute the part's layers.

        Args:
            states: float32 ``[T, hidden]`` on the CPU, from the stage before; None for the first stage.

        Returns:
            Float32 on the CPU: states ``[T, hidden]``; of the last stage logits ``[R, V]``, from its first shard alone.
        """


class PackedStage(Protocol):
    """The part of a forward that differs between models."""

    def __call__(self, batch: InputBatch, states: Tensor | None) -> Tensor: ...


class PythonStage:
    """A part of a model whose forward reads packed batches, on any device.

    Args:
        forward: states ``[T, hidden]`` or None to states, or logits ``[R, V]``.
    """

    def __init__(self, forward: PackedStage, cache: KVCache, shard: Shard) -> None:
        self.cache, self._forward, self._shard = cache, forward, shard

    @torch.inference_mode()
    def run(self, batch: StageBatch, states: Tensor | None) -> Tensor | None:
        """See ``StageForward``."""
        tokens, tables = batch.unpack()
        packed = self.cache.pack_with(tokens, tables)
        given = None if states is None else states.to(self.cache.device)
        found = self._forward(packed, given).float().cpu()
        return None if self._shard.last and self._shard.rank else found
