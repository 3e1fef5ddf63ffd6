"""The parts of a sharded model in one process, and sharded engines around tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from cospec.core.interfaces import Model, NativeForward
from cospec.core.model_io import RolloutOutput, RolloutParams, TokenBatch
from cospec.core.types import Commit
from cospec.distributed.shard_sum import in_order
from cospec.models.block_manager import BlockPool
from cospec.models.loading import LoadOptions, load_stage
from cospec.models.shard import Shard
from cospec.models.stage import StageBatch, StageForward

PAGES = 64


@dataclass
class _Products:
    """The products of a stage's shards, sum by sum, as far as known."""

    totals: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)  # the first unknown product of each shard
    calls: int = 0

    def sum(self, product: Tensor) -> None:
        if self.calls < len(self.totals):
            product.copy_(self.totals[self.calls])
        elif self.calls == len(self.totals):
            self.own.append(product.clone())
        self.calls += 1


class StageOfShards:
    """One stage whose shards are computed one after the other: each sum costs a forward of every shard."""

    def __init__(self, name: str, options: LoadOptions, shard: Shard) -> None:
        self._products, self._ranks = _Products(), shard.ranks
        add = self._products.sum if shard.ranks > 1 else None
        self._shards: list[StageForward] = [
            load_stage(name, replace(options, shard=replace(shard, rank=rank)), add) for rank in range(shard.ranks)
        ]

    def run(self, batch: StageBatch, states: Tensor | None) -> Tensor:
        products = self._products
        products.totals.clear()
        while True:
            products.own.clear()
            found = None
            for shard in self._shards:
                products.calls = 0
                found = shard.run(batch, states) if found is None else found
                if shard is not self._shards[0]:
                    shard.run(batch, states)
            if self._ranks == 1 or products.calls == len(products.totals):
                assert found is not None
                return found
            products.totals.append(in_order(products.own))


class StageAlone:
    """One part without others to sum with."""

    def __init__(self, part: StageForward) -> None:
        self._part = part

    def run(self, batch: StageBatch, states: Tensor | None) -> Tensor:
        found = self._part.run(batch, states)
        assert found is not None
        return found


class ShardsHere:
    """A model in parts, all in this process; the reference of parts in other processes."""

    def __init__(self, name: str | Path, stages: int, ranks: int = 1, options: LoadOptions = LoadOptions()) -> None:
        options = replace(options, device="cpu", num_pages=PAGES)
        self.pages = BlockPool(PAGES, options.page_size)
        shards = [Shard(stage, stages, 0, ranks) for stage in range(stages)]
        self.stages: list[StageOfShards | StageAlone] = [StageOfShards(str(name), options, shard) for shard in shards]

    def forward(self, batch: TokenBatch) -> Tensor:
        """Logits ``[R, V]``."""
        return through(self.stages, StageBatch.of(batch, self.pages.table))


class TargetOfShards(ShardsHere):
    """The same as the target of an engine without drafts, which leave no entries to move."""

    name = "shards"
    dtype = torch.float32
    device = torch.device("cpu")
    hidden_states: Tensor | None = None
    native_forward: NativeForward | None = None
    has_rollout = False
    pipelined_model = None

    def __init__(self, name: Path, ranks: int, options: LoadOptions, like: Model) -> None:
        super().__init__(name, 1, ranks, options)
        self.vocab_size, self.max_len = like.vocab_size, like.max_len

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        raise NotImplementedError("``has_rollout`` is False")

    def commit(self, commits: Sequence[Commit]) -> None:
        assert not any(commit.path for commit in commits)

    def free(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.pages.free(id)


def through(stages: Sequence[StageOfShards | StageAlone], batch: StageBatch) -> Tensor:
    """The logits after stages in this order."""
    states: Tensor | None = None
    for stage in stages:
        states = stage.run(batch, states)
    assert states is not None
    return states


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether some bits differ."""
    return not torch.equal(one, other)
