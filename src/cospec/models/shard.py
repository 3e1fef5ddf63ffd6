"""The part of a model that one process of a sharded target holds: consecutive layers, and a share of their width.

Pipeline stages divide the layers. Inside a stage, shards divide heads and columns by the model's own plan for tensor
parallelism. A process reads only its part of the weight files. Each of several stages ties its output layer to
its embedding, and so allocates one table: the first stage has the embedding, the last stage the output layer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cospec.errors import InvalidInput, ModelError
from cospec.models.model_folder import weight_files

SumShards = Callable[[Tensor], None]
"""Replaces a shard's float32 product by the sum of all shards' products, added in the order of the shards."""

_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_DIMENSION = {"colwise": 0, "rowwise": 1}


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
    if not kinds >= set(_DIMENSION) or 0 in widths:
        raise InvalidInput("tensor_parallel_size", ranks, f"1 for {config.model_type}, which has no plan for more")
    unknown = sorted(kind for kind in kinds - set(_DIMENSION) if not kind.startswith("replicated"))
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
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    part.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        part.layer_types = [config.layer_types[layer] for layer in layers]
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


class ShardReader:
    """Reads a part's tensors from weight files.

    Args:
        model: the part's module, on any device; only names are read.
        config: of the whole model.
    """

    def __init__(self, model: Any, config: Any, shard: Shard) -> None:
        self._config, self._shard = config, shard
        self._layers = shard.layers(config.num_hidden_layers)
        names = {id(module): name for name, module in model.named_modules()}
        lists = [
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == len(self._layers)
        ]
        if not lists:
            raise ModelError(
                f"The layers of the model {config.model_type} are not one list, so stages cannot share it."
            )
        self._list = lists[0]
        self._embedding = names[id(model.get_input_embeddings())] + ".weight"
        self._head = names[id(model.get_output_embeddings())] + ".weight"
        prefix = f"{model.base_model_prefix}."
        self._base = prefix if self._list.startswith(prefix) else ""

    def read(self, files: Sequence[Path]) -> dict[str, Tensor]:
        """Return the tensors of the part by their names in the part's module."""
        found: dict[str, Tensor] = {}
        tied = bool(self._config.tie_word_embeddings) or not self._has_head(files)
        for file, key in _keys(files):
            name = self._own_name(key, tied)
            if name is not None:
                with safe_open(str(file), framework="pt") as tensors:
                    found[name] = self._cut(tensors.get_slice(key), name)
        if not self._shard.first and not self._shard.last:
            found[self._embedding] = torch.zeros(1, self._config.hidden_size)
        return found

    def _has_head(self, files: Sequence[Path]) -> bool:
        return any(self._full(key) == self._head for _, key in _keys(files))

    def _full(self, key: str) -> str:
        """Return a key with the prefix that files of base models lack."""
        inside = key.startswith(self._base) or key.partition(".")[0] == self._head.partition(".")[0]
        return key if inside else self._base + key

    def _own_name(self, key: str, tied: bool) -> str | None:
        """Return the name in the part of a tensor that the part needs; None for other tensors."""
        name = self._full(key)
        if name in (self._embedding, self._head) and self._shard.stages > 1:
            table = self._embedding if tied or self._shard.first else self._head
            read = self._shard.first or self._shard.last
            return self._embedding if read and name == table else None
        if not name.startswith(self._list + "."):
            return name
        number, _, rest = name.removeprefix(self._list + ".").partition(".")
        place = int(number) - self._layers.start
        return f"{self._list}.{place}.{rest}" if 0 <= place < len(self._layers) else None

    def _cut(self, tensor: Any, name: str) -> Tensor:
        """Read the shard's rows or columns of a tensor."""
        shape, shard = tensor.get_shape(), self._shard
        module, _, kind = name.rpartition(".")
        how = plan_of(self._config, module.removeprefix(self._base)) if shard.ranks > 1 else None
        if how is None:
            whole: Tensor = tensor[:] if shape else tensor[...]
            return whole
        if kind == "bias" and how == "rowwise":  # the sum of the shards has the bias once
            bias: Tensor = tensor[:]
            return bias if shard.rank == 0 else torch.zeros_like(bias)
        dimension = _DIMENSION[how]
        each = shape[dimension] // shard.ranks
        own = slice(shard.rank * each, (shard.rank + 1) * each)
        cut: Tensor = tensor[own] if dimension == 0 else tensor[:, own]
        return cut.contiguous()


def part_tensors(config: Any, whole: Any, shard: Shard, folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a part from the model's folder, by their names in the part's module.

    Args:
        config: of the part, see ``shard_config``; ``whole`` of the model.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config)
    return ShardReader(names, whole, shard).read(weight_files(folder))


def plan_of(config: Any, module: str) -> str | None:
    """Return how shards divide a module of the base model: ``colwise``, ``rowwise``, or None for not at all."""
    for pattern, how in _plan(config).items():
        if how in _DIMENSION and re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), module):
            return how
    return None


def _keys(files: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    for file in files:
        with safe_open(str(file), framework="numpy") as tensors:
            names = list(tensors.keys())
        for name in names:
            yield file, name
