"""Sources of a model's weights: tensors by transformers' names, read one at a time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, cast

import torch
from safetensors import safe_open
from torch import Tensor

from cospec.models.weights.blocks import BlockFormat
from cospec.models.weights.format import ReadWeight, StoredWeight, WeightFormat, bytes_of
from cospec.registry import WEIGHT_FORMATS

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUTPUT_EMBEDDINGS = (HEAD, EMBEDDING)  # the second where both embeddings are one

MULTIMODAL = ("gemma3",)
"""Model types that have a text model in transformers' ``text_config``, which is all that is loaded."""
FREQUENCIES = ".rotary_emb.inv_freq"
"""The end of names of tensors that early files have, and that the configuration replaces."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating dtypes by safetensors' names."""


class PackedWeight(NamedTuple):
    """How a file holds a quantized weight.

    Attributes:
        type: the file's name for it.
        bytes: in the file.
    """

    type: str
    bytes: int


class WeightSource(ABC):
    """The tensors of one model, in one or several files.

    Attributes:
        shapes: of all tensors by transformers' names.
        dtype: the most frequent floating dtype of the tensors; float32 where blocks are most frequent.
        packed: whether transformers cannot read the files.
        kinds: the block formats of weights ``[..., out, in]`` that the files hold in blocks.
        orders: of weights whose blocks hold the inputs in another order, see ``StoredWeight.order``.
        float16: the names of tensors that the files hold in float16.
        quantized: all weights ``[..., out, in]`` that the files hold quantized, in blocks or not.
        floats: names of matrices that are float32 in memory in every format.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    kinds: Mapping[str, str] = MappingProxyType({})
    orders: Mapping[str, Tensor] = MappingProxyType({})
    float16: Collection[str] = ()
    quantized: Mapping[str, PackedWeight] = MappingProxyType({})
    floats: Collection[str] = ()
    packed: bool = False

    @property
    def elements(self) -> int:
        """Number of weights in all tensors."""
        return sum(map(prod, self.shapes.values()))

    def num_bytes(self, format: WeightFormat, convert: bool = False, without: Collection[str] = ()) -> int:
        """Return the bytes of tensors in memory, linear weights as ``linear`` returns them.

        Args:
            without: names of tensors that do not count.
        """
        return self._bytes_by_format(format, convert, without).total()

    def formats(self, format: WeightFormat, convert: bool = False) -> str:
        """Return the formats of tensors in memory with their shares of the bytes: ``q4_k 80%, q6_k 20%``.

        A single format has no share; a format below half a percent is left out. Vectors count for ``format``.
        """
        found = self._bytes_by_format(format, convert)
        shares = {name: round(100 * size / found.total()) for name, size in found.most_common()}
        named = {name: f"{name} {share}%" for name, share in shares.items() if share}
        return ", ".join(named.values() if len(named) > 1 else named)

    def _bytes_by_format(self, format: WeightFormat, convert: bool, without: Collection[str] = ()) -> Counter[str]:
        found: Counter[str] = Counter()
        for name, shape in self.shapes.items():
            if name not in without:
                kept = self.kept_format(name, format, convert) if len(shape) > 1 else None
                own = WEIGHT_FORMATS.load("fp32")() if name in self.floats else kept or format
                found[own.name] += bytes_of(own, [shape])
        return found

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
        """Return the files' own format of a weight if it replaces ``format``.

        These are blocks, and float16 in place of float32, whose products have the same bits as float16's.
        """
        if convert:
            return None
        if name in self.kinds:
            return block_format(self.kinds[name])
        keeps = name in self.float16 and format.dtype is torch.float32
        return WEIGHT_FORMATS.load("fp16")() if keeps else None

    def in_layers(self, format: WeightFormat, native: bool) -> Self:
        """Return the source as transformers' layers on a CPU hold its weights, for counts alone.

        Args:
            native: whether linear layers hold ``format``. Other back ends hold float32, and so do experts, and
                embeddings in most formats.
        """
        found = copy(self)
        table = {EMBEDDING} if format.table_dtype is torch.float32 else set()
        found.floats = {name for name in self.shapes if not native or ".experts." in name or name in table}
        found.kinds = {name: kind for name, kind in self.kinds.items() if native and is_linear(name)}
        found.float16 = {name for name in self.float16 if native and is_linear(name)}
        return found

    def expanded(self, format: WeightFormat, convert: bool = False) -> list[str]:
        """Return the names of quantized weights that become floats."""
        if format.dtype is None:
            return []
        return [name for name in self.quantized if self.kept_format(name, format, convert) is None]

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
            return kept.from_blocks(self.blocks(name), self.shapes[name][-1], self.orders.get(name))
        value = self.read(name).flatten(0, -2)
        return (kept or format).read(value if dtype is None else value.to(dtype))

    def reader(self, format: WeightFormat, dtype: torch.dtype | None = None, convert: bool = False) -> ReadWeight:
        """Return ``linear`` by the names of modules; other weights are those that are given.

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
        """Return the embedding in its own blocks; None if the embedding is stored as floats, or in another order."""
        if convert or EMBEDDING not in self.kinds or EMBEDDING in self.orders:
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


def text_name(name: str) -> str | None:
    """Return the name in the text model of a multimodal model's tensor or module; None outside the text model."""
    if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    return name.removeprefix("language_model.").replace("model.language_model.", "model.")


class SafetensorsSource(WeightSource):
    """Floating tensors of safetensors files. Tensors are mapped, and read when they are converted.

    Args:
        multimodal: whether the model is one of ``MULTIMODAL``.
    """

    def __init__(self, files: Sequence[Path], multimodal: bool = False) -> None:
        opened = [safe_open(str(file), framework="pt") for file in files]
        keys = [(handle, key) for handle in opened for key in handle.keys()]  # noqa: SIM118 - no mapping
        named = {text_name(key) if multimodal else key: (handle, key) for handle, key in keys}
        self._of = {name: place for name, place in named.items() if name is not None}
        self.packed = self.packed or multimodal
        self.shapes = {name: tuple(self._slice(name).get_shape()) for name in self._of}
        counts = Counter(str(self._slice(name).get_dtype()) for name in self._of)
        floating = {name: count for name, count in counts.items() if name in DTYPES}
        self.dtype = DTYPES[max(floating, key=lambda name: floating[name], default="F32")]
        self.float16 = {name for name in self._of if self._slice(name).get_dtype() == "F16"}

    def _slice(self, name: str) -> Any:
        handle, key = self._of[name]
        return handle.get_slice(key)

    def read(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        handle, key = self._of[name]
        tensor: Tensor = handle.get_tensor(key)
        return tensor

    def has_rows(self, name: str) -> bool:
        """See ``WeightSource``."""
        return True

    def row(self, name: str, number: int) -> Tensor:
        """See ``WeightSource``."""
        rows: Tensor = self._slice(name)[number : number + 1]
        return rows[0]

    def file_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in the files; 0 without the tensor."""
        if name not in self._of:
            return 0
        found = self._slice(name)
        bits = int(re.findall(r"\d+", found.get_dtype())[0])  # of a number: the dtype is F8_E4M3, I32 and so on
        size: int = prod(found.get_shape()) * bits // 8
        return size
