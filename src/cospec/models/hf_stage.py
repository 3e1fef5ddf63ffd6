"""A part of a Hugging Face model as a stage of a pipeline, with unchanged model code.

The model has only the layers of its stage. Hooks replace what enters the first layer, and take what leaves the last
one. What a model does before its layers, such as adding positions, therefore counts in the first stage alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cospec.models.attention.backend import AttentionBackend
from cospec.models.hf import call_layers
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache
from cospec.models.shard import Shard, SumShards, plan_of


class _LayersDone(Exception):
    """The last layer of the stage has run; the model's output layer is another stage's."""


class HFStage:
    """The forward of a stage, see ``stage.PackedStage``.

    Args:
        model: with the layers of the stage and no others.
        config: of the whole model, whose plan says where shards are summed.
        sum: the sum over the shards of the stage; None for one shard.
    """

    def __init__(
        self, model: Any, config: Any, cache: KVCache, attention: AttentionBackend, shard: Shard, sum: SumShards | None
    ) -> None:
        self._model, self._cache, self._attention, self._shard = model, cache, attention, shard
        self._given: Tensor | None = None
        self._taken: Tensor | None = None
        layers = next(
            module
            for module in model.modules()
            if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers
        )
        if not shard.first:
            layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not shard.last:
            layers[-1].register_forward_hook(self._leave)
        if sum is not None:
            for name, module in model.base_model.named_modules():
                if plan_of(config, name) == "rowwise":
                    module.register_forward_hook(_summed(sum))

    def __call__(self, batch: InputBatch, states: Tensor | None) -> Tensor:
        """See ``stage.PackedStage``."""
        rows = batch.logit_rows if len(batch.logit_rows) else batch.logit_rows.new_zeros(1)
        self._given = states
        inputs = self._inputs(batch)
        try:
            logits = call_layers(
                self._model, inputs, batch.positions, self._cache, self._attention.prepare(batch), rows
            )
            return logits[: len(batch.logit_rows)]
        except _LayersDone:
            assert self._taken is not None
            taken, self._taken = self._taken, None
            return taken
        finally:
            self._given = None

    def _inputs(self, batch: InputBatch) -> dict[str, Tensor]:
        if self._shard.first:
            return {"input_ids": batch.ids[None]}
        hidden = self._model.config.hidden_size
        dtype = next(self._model.parameters()).dtype
        return {"inputs_embeds": torch.zeros(1, len(batch.ids), hidden, dtype=dtype, device=self._cache.device)}

    def _enter(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._given is not None
        if "hidden_states" in kwargs:
            old = kwargs["hidden_states"]
            return args, {**kwargs, "hidden_states": self._given.to(old.dtype).view_as(old)}
        return (self._given.to(args[0].dtype).view_as(args[0]), *args[1:]), kwargs

    def _leave(self, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        states: Tensor = output[0] if isinstance(output, tuple) else output
        self._taken = states.flatten(0, -2)
        raise _LayersDone


def _summed(sum: SumShards) -> Any:
    def hook(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        total = output.float().cpu().contiguous()
        sum(total)
        return total.to(output)

    return hook
