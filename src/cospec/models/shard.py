"""The part of a model that one process of a sharded target holds: consecutive layers, and a share of their width.

Pipeline stages divide the layers. Inside a stage, shards divide heads and columns by the model's own plan for tensor
parallelism. A process reads only its part of the weight files, see ``part_source``. Each of several stages ties its
output layer to its embedding, and so allocates one table: the first stage has the embedding, the last stage the output
layer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cospec.errors import InvalidInput
from cospec.models.families import experts_in, head_dim

SumShards = Callable[[Tensor], None]
"""Replaces a shard's float32 product by the sum of all shards' products, added in the order of the shards."""

_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_PER_LAYER = ("layer_types", "no_rope_layers")  # lists of a configuration with a value of each layer
DIMENSION = {"colwise": 0, "rowwise": 1}
"""The dimension of a weight ``[out, in]`` that shards divide, by the kind in the model's plan."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A stage of a pipeline, and a shard of the stage."""

    stage: int = 0
    stages: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def whole(self) -> bool:
        """Whether the part is the whole model."""
        return self.stages == self.ranks == 1

    @property
    def first(self) -> bool:
        """Whether the stage embeds the tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether the stage computes logits."""
        return self.stage == self.stages - 1

    def layers(self, count: int) -> range:
        """Return the layers of the stage out of ``count``; earlier stages take those that do not divide.

        The last stage has the output layer besides.
        """
        each, more = divmod(count, self.stages)
        start = self.stage * each + min(self.stage, more)
        return range(start, start + each + (self.stage < more))


def check_shards(config: Any, stages: int, ranks: int) -> None:
    """Refuse a division that the model does not allow.

    Args:
        config: transformers' configuration of the whole model.

    Raises:
        InvalidInput: the model does not divide into so many parts, or has no plan for tensor parallelism.
    """
    if config.get_text_config() is not config and stages * ranks > 1:
        raise InvalidInput("pipeline_parallel_size", stages, "1 for a model that reads more than text")
    layers = config.num_hidden_layers
    if stages > layers:
        raise InvalidInput("pipeline_parallel_size", stages, f"1 to {layers}, the layers of the model")
    if ranks == 1:
        return
    kinds = {kind for name, kind in _plan(config).items() if name.startswith("layers.")}
    widths: list[int] = [getattr(config, name, None) or 0 for name in _WIDTHS]
    if not kinds >= set(DIMENSION) or 0 in widths:
        raise InvalidInput("tensor_parallel_size", ranks, f"1 for {config.model_type}, which has no plan for more")
    unknown = sorted(kind for kind in kinds - set(DIMENSION) if not kind.startswith("replicated"))
    if unknown:
        raise InvalidInput("tensor_parallel_size", ranks, f"1 for {config.model_type}, whose plan has {unknown[0]}")
    if any(width % ranks for width in widths):
        heads, shared, columns = widths
        allowed = f"a divisor of {heads} heads, {shared} key and value heads and {columns} columns"
        raise InvalidInput("tensor_parallel_size", ranks, allowed)


def _plan(config: Any) -> Mapping[str, str]:
    return getattr(config, "base_model_tp_plan", None) or {}


def shard_config(config: Any, shard: Shard) -> Any:
    """Return the configuration of a part; ``config`` itself for the whole model."""
    if shard.whole:
        return config
    part, layers = copy.deepcopy(config), shard.layers(config.num_hidden_layers)
    heads = head_dim(config)
    part.num_hidden_layers = len(layers)
    for name in _PER_LAYER:
        if getattr(config, name, None):
            setattr(part, name, [getattr(config, name)[layer] for layer in layers])
    if hasattr(config, "mlp_only_layers"):  # the rule counts layers of the whole model
        part.mlp_only_layers = [own for own, layer in enumerate(layers) if not experts_in(config, layer)]
        part.decoder_sparse_step = 1
    if shard.ranks > 1:
        part.head_dim = heads
        for name in _WIDTHS:
            setattr(part, name, getattr(config, name) // shard.ranks)
    part.pad_token_id = None
    if shard.stages > 1:
        part.tie_word_embeddings = True
    if not shard.first and not shard.last:
        part.vocab_size = 1  # of a table that no forward reads
    return part


def plan_of(config: Any, module: str) -> str | None:
    """Return how shards divide a module of the base model: ``colwise``, ``rowwise``, or None for not at all."""
    for pattern, how in _plan(config).items():
        if how in DIMENSION and re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), module):
            return how
    return None
