"""Sources of a model's weights: tensors by transformers' names, read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, cast

import torch
from safetensors import safe_open
from torch import Tensor

from cospec.models.weights.blocks import BlockFormat
from cospec.models.weights.format import ReadWeight, StoredWeight, WeightFormat, bytes_of
from cospec.registry import WEIGHT_FORMATS

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUTPUT_EMBEDDINGS = (HEAD, EMBEDDING)  # the second where both embeddings are one

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating dtypes by safetensors' names."""


class WeightSource(ABC):
    """The tensors of one model, in one or several files.

    Attributes:
        shapes: of all tensors by transformers' names.
        dtype: the most frequent floating dtype of the tensors; float32 where blocks are most frequent.
        packed: whether transformers cannot read the files.
        kinds: the block formats of weights ``[..., out, in]`` that the files hold in blocks.
        float16: the names of tensors that the files hold in float16.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    kinds: Mapping[str, str] = MappingProxyType({})
    float16: Collection[str] = ()
    packed: ClassVar[bool] = False

    @property
    def elements(self) -> int:
        """Number of weights in all tensors."""
        return sum(map(prod, self.shapes.values()))

    def num_bytes(self, format: WeightFormat, convert: bool = False, without: Sequence[str] = ()) -> int:
        """Return the bytes of tensors in memory, linear weights as ``linear`` returns them.

        Args:
            without: names of tensors that do not count.
        """
        counted = {name: shape for name, shape in self.shapes.items() if name not in without}
        kept = {name: self.kept_format(name, format, convert) for name, shape in counted.items() if len(shape) > 1}
        own = [found.num_bytes(prod(counted[name][:-1]), counted[name][-1]) for name, found in kept.items() if found]
        return sum(own) + bytes_of(format, [shape for name, shape in counted.items() if not kept.get(name)])

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return the value of a tensor, in a floating dtype that holds the value exactly."""

    def has_rows(self, name: str) -> bool:
        """Whether ``row`` reads no other rows of the matrix."""
        return False

    def row(self, name: str, number: int) -> Tensor:
        """Return one row of a matrix."""
        return self.read(name)[number]

    def blocks(self, name: str) -> Tensor:
        """Return the file blocks ``[out, bytes of a row]`` of a weight in ``kinds``, expert after expert."""
        raise KeyError(name)

    def kept_format(self, name: str, format: WeightFormat, convert: bool = False) -> WeightFormat | None:
        """Return the files' own format of a weight if it replaces ``format`` at no loss.

        These are blocks, and float16 in place of float32: the products of both have the same bits.
        """
        if convert:
            return None
        if name in self.kinds:
            return block_format(self.kinds[name])
        keeps = name in self.float16 and format.dtype is torch.float32
        return WEIGHT_FORMATS.load("fp16")() if keeps else None

    def linear(
        self, name: str, format: WeightFormat, dtype: torch.dtype | None = None, convert: bool = False
    ) -> StoredWeight:
        """Return a weight ``[out, in]``, or experts one after another: in ``kept_format``, or in ``format``.

        Args:
            dtype: that values are rounded to first; None does not round.
            convert: use ``format`` for weights in blocks too.
        """
        kept = self.kept_format(name, format, convert)
        if isinstance(kept, BlockFormat):
            return kept.from_blocks(self.blocks(name), self.shapes[name][-1])
        value = self.read(name).flatten(0, -2)
        return (kept or format).read(value if dtype is None else value.to(dtype))

    def reader(self, format: WeightFormat, dtype: torch.dtype | None = None, convert: bool = False) -> ReadWeight:
        """Return ``linear`` by the names of modules; other weights are those of the modules.

        The output layer of a model without a weight of its own has the embedding's.
        """

        def read(module: str, weight: Tensor) -> StoredWeight:
            name = module if module in self.shapes else f"{module}.weight"  # experts have no module of their own
            tied = name == HEAD and HEAD not in self.shapes and EMBEDDING in self.shapes
            name = EMBEDDING if tied else name
            placeholder = not any(weight.stride())
            if placeholder or tied:
                return self.linear(name, format, dtype, convert)
            return format.read(weight.flatten(0, -2))

        return read

    def table(self, convert: bool = False) -> StoredWeight | None:
        """Return the embedding in its own blocks; None if the embedding is stored as floats."""
        if convert or EMBEDDING not in self.kinds:
            return None
        return block_format(self.kinds[EMBEDDING]).from_blocks(self.blocks(EMBEDDING), self.shapes[EMBEDDING][1])

    @property
    def experts(self) -> list[str]:
        """The names of tensors that hold the weights of all experts of a layer."""
        return [name for name in self.shapes if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]

    def state_dict(self, dtype: torch.dtype, without: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return all tensors as ``dtype``. Weights that ``reader`` reads are placeholders without memory.

        Args:
            without: more tensors that become placeholders.
        """
        found = {}
        for name, shape in self.shapes.items():
            empty = is_linear(name) or name in without
            found[name] = torch.zeros(1, dtype=dtype).expand(shape) if empty else self.read(name).to(dtype)
        return found


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of a linear layer, by the names that all families of GGUF files have.

    Experts that a file stores one by one do not count: transformers joins them.
    """
    return (name.endswith("_proj.weight") and ".experts." not in name) or name == HEAD


def block_format(kind: str) -> BlockFormat:
    """Return the format of blocks of that name."""
    found = WEIGHT_FORMATS.load(kind)()
    return cast(BlockFormat, found)


class SafetensorsSource(WeightSource):
    """Floating tensors of safetensors files. Tensors are mapped, and read when they are converted."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._open = [safe_open(str(file), framework="pt") for file in files]
        self._of = {name: handle for handle in self._open for name in handle.keys()}  # noqa: SIM118 - no mapping
        self.shapes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._of.items()}
        counts = Counter(str(handle.get_slice(name).get_dtype()) for name, handle in self._of.items())
        floating = {name: count for name, count in counts.items() if name in DTYPES}
        self.dtype = DTYPES[max(floating, key=lambda name: floating[name], default="F32")]
        self.float16 = {name for name, handle in self._of.items() if handle.get_slice(name).get_dtype() == "F16"}

    def read(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        tensor: Tensor = self._of[name].get_tensor(name)
        return tensor

    def has_rows(self, name: str) -> bool:
        """See ``WeightSource``."""
        return True

    def row(self, name: str, number: int) -> Tensor:
        """See ``WeightSource``."""
        rows: Tensor = self._of[name].get_slice(name)[number : number + 1]
        return rows[0]
