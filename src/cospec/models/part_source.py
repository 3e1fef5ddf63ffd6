"""The weights of a part of a model, as a source: the part's layers, and a shard's rows or columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cospec.errors import InvalidInput, ModelError
from cospec.models.files.source import EMBEDDING, HEAD, WeightSource
from cospec.models.shard import DIMENSION, Shard, plan_of
from cospec.models.weights.format import WeightFormat


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names of a model's list of layers, of both embeddings' weights, and the prefix that base models lack."""

    layers: str = "model.layers"
    embedding: str = EMBEDDING
    head: str = HEAD
    base: str = "model."

    @classmethod
    def of(cls, config: Any) -> ModuleNames:
        """Return the names of a model in transformers' code.

        Raises:
            ModelError: the layers are not one list.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        names = {id(module): name for name, module in model.named_modules()}
        lists = [
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
        ]
        if not lists:
            raise ModelError(
                f"The layers of the model {config.model_type} are not one list, so stages cannot share it."
            )
        tables = [names[id(table)] for table in (model.get_input_embeddings(), model.get_output_embeddings())]
        prefix = f"{model.base_model_prefix}."
        base = prefix if lists[0].startswith(prefix) else ""
        return cls(lists[0], f"{tables[0]}.weight", f"{tables[1]}.weight", base)


LLAMA_NAMES = ModuleNames()
"""The names in all families of the hand-written forward."""


class PartSource(WeightSource):
    """Reads a part's tensors from the source of the whole model, by their names in the part's module.

    With several stages the embedding of the last stage is the output layer. Stages between have a table of one row.

    Args:
        config: of the whole model.
    """

    def __init__(self, source: WeightSource, config: Any, shard: Shard, names: ModuleNames = LLAMA_NAMES) -> None:
        self._source, self._config, self._shard, self._names = source, config, shard, names
        self._layers = shard.layers(config.num_hidden_layers)
        self._tied = bool(config.tie_word_embeddings) or names.head not in map(self._full, source.shapes)
        own = {self._own_name(key): key for key in source.shapes}
        self._keys = {name: key for name, key in own.items() if name is not None}
        self.shapes = {name: self._shape(name, source.shapes[key]) for name, key in self._keys.items()}
        if not shard.first and not shard.last:
            self.shapes[names.embedding] = (1, config.hidden_size)
        self.packed, self.dtype = source.packed, source.dtype
        self.kinds = {name: source.kinds[key] for name, key in self._keys.items() if key in source.kinds}
        self.orders = {name: source.orders[key] for name, key in self._keys.items() if key in source.orders}
        self.float16 = {name for name, key in self._keys.items() if key in source.float16}

    def read(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        if name not in self._keys:
            return torch.zeros(self.shapes[name])
        return self._cut(self._source.read(self._keys[name]), name)

    def blocks(self, name: str) -> Tensor:
        """See ``WeightSource``; shards divide inputs between blocks, see ``check_columns``."""
        return self._cut(self._source.blocks(self._keys[name]), name)

    def own_update(self, module: str, update: Tensor) -> tuple[str | None, Tensor]:
        """Return the part's module, and its rows or columns of an update of a weight; None for other parts' modules.

        An update that does not divide is whole, so that it fits no weight of a part.
        """
        key = f"{module}.weight"
        name = self._own_name(self._names.embedding if self._tied and key == self._names.head else key)
        if name is None:
            return None, update
        divided = self._dimension(name)
        whole = divided is not None and update.shape[divided] % self._shard.ranks > 0
        return name.removesuffix(".weight"), update if whole else self._cut(update, name)

    def _full(self, key: str) -> str:
        """Return a key with the prefix that files of base models lack."""
        names = self._names
        inside = key.startswith(names.base) or key.partition(".")[0] == names.head.partition(".")[0]
        return key if inside else names.base + key

    def _own_name(self, key: str) -> str | None:
        """Return the name in the part of a tensor that the part needs; None for other tensors."""
        name, names, shard = self._full(key), self._names, self._shard
        if name in (names.embedding, names.head) and shard.stages > 1:
            table = names.embedding if self._tied or shard.first else names.head
            return names.embedding if (shard.first or shard.last) and name == table else None
        number, _, rest = name.removeprefix(f"{names.layers}.").partition(".")
        if not name.startswith(f"{names.layers}.") or int(number) >= self._config.num_hidden_layers:
            return name
        return f"{names.layers}.{int(number) - self._layers.start}.{rest}" if int(number) in self._layers else None

    def _dimension(self, name: str) -> int | None:
        """Return the dimension of a tensor that shards divide; None if every shard has the whole tensor."""
        module = name.rpartition(".")[0].removeprefix(self._names.base)
        how = plan_of(self._config, module) if self._shard.ranks > 1 else None
        return None if how is None else DIMENSION[how]

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        divided = self._dimension(name)
        return tuple(size // self._shard.ranks if place == divided else size for place, size in enumerate(shape))

    def _cut(self, tensor: Tensor, name: str) -> Tensor:
        """Return the shard's rows or columns of a tensor."""
        divided, shard = self._dimension(name), self._shard
        if divided is None:
            return tensor
        if divided == tensor.dim():  # the sum of the shards has the bias once
            return tensor if shard.rank == 0 else torch.zeros_like(tensor)
        each = tensor.shape[divided] // shard.ranks
        return tensor.narrow(divided, shard.rank * each, each).contiguous()


def check_columns(source: WeightSource, config: Any, ranks: int, format: WeightFormat, convert: bool) -> None:
    """Refuse shards that would divide inputs inside a block, or blocks that hold inputs in another order.

    Args:
        source, config: of the whole model.
        format: of weights that do not keep their own format, see ``WeightSource.kept_format``.

    Raises:
        InvalidInput: a weight does not divide so.
    """
    for name, shape in source.shapes.items():
        if plan_of(config, name.removesuffix(".weight").removeprefix(LLAMA_NAMES.base)) != "rowwise":
            continue
        if name in source.orders and not convert and ranks > 1:
            allowed = f"1, as the blocks of {name} hold its inputs in an order of their own (act-order)"
            raise InvalidInput("tensor_parallel_size", ranks, allowed)
        own, inputs = source.kept_format(name, format, convert) or format, shape[-1]
        blocks = inputs // own.block_size if own.block_size and inputs % own.block_size == 0 else 1
        if blocks % ranks:
            allowed = f"a divisor of {blocks}, the blocks of {own.name} in a row of {name}"
            raise InvalidInput("tensor_parallel_size", ranks, allowed)
