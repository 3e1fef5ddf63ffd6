"""The base class of weight formats, and weights in a format.

A format reads a floating weight into *parts*: tensors whose first dimension is the outputs. Weights of one input
therefore join, and rows interleave, part by part in every format. ``product`` is the readable product; the native
kernels compute the same product from packed parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cospec.errors import InvalidInput, words
from cospec.registry import QUANTIZATION_ALIASES, WEIGHT_FORMATS, check_quantization, wrong_quantization

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by the names of the option ``dtype``."""
Rows = Callable[[list[Tensor]], Tensor]
"""Joins tensors along their first dimension."""
ReadWeight = Callable[[str, Tensor], "StoredWeight"]
"""Reads the weight of a linear layer: the name of its module, and the module's tensor ``[out, in]``."""


class WeightFormat(ABC):
    """A format of linear weights. An object has no state.

    Attributes:
        dtype: the option ``dtype`` that selects the format; None if the option ``quantization`` names the format.
        devices: types of devices that compute with the format.
        rounds_inputs: whether ``round_inputs`` changes inputs.
        block_size: inputs that share a scale; 0: all inputs of an output. Shards divide inputs between blocks.
        table_dtype: of embedding tables, which are looked up instead of multiplied.
        kernel: the native kernel that reads the tensors of ``pack``, see ``csrc/ops/weight_formats.h``.
    """

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype | None] = None
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    rounds_inputs: ClassVar[bool] = False
    block_size: ClassVar[int] = 0
    table_dtype: ClassVar[torch.dtype] = torch.float32
    kernel: ClassVar[str] = "fp32"

    @abstractmethod
    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a floating weight ``[out, in]``. Parts of zeros are a weight of zeros."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the value ``[out, in]`` of parts, in the floating ``dtype``; inputs may be padded with zeros."""

    @abstractmethod
    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of all parts of a weight ``[outputs, inputs]``."""

    def pack(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that ``kernel`` reads; the default widens the weight to float32."""
        return (self.decode(parts, torch.float32),)

    def read(self, weight: Tensor) -> StoredWeight:
        """Read a weight ``[out, in]`` of any floating dtype.

        Raises:
            InvalidInput: the weight has other dimensions, or is empty.
        """
        if weight.dim() != 2 or weight.numel() == 0:
            raise InvalidInput("weight", words(f"of shape {tuple(weight.shape)}"), "[out, in] with neither empty")
        return StoredWeight(self, self.encode(weight.detach()), weight.shape[1])

    def round_inputs(self, x: Tensor) -> Tensor:
        """Return inputs rounded as products round them, in the dtype of ``x``."""
        return x

    def round_in_order(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Return inputs rounded as products of a weight with that ``order`` round them."""
        return self.round_inputs(x) if order is None else self.round_inputs(x[..., order])[..., order.argsort()]

    def product(self, x: Tensor, weight: StoredWeight, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``, ``[..., in]`` to ``[..., out]``, in the dtype of ``x``."""
        return F.linear(self.round_in_order(x, weight.order), weight.decode(x.dtype), bias)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A weight ``[outputs, inputs]`` in one format.

    Attributes:
        parts: the tensors of the format; the first dimension of each is the outputs.
        order: int64 ``[inputs]``, the input of each column in ``parts``; None where they have one order. Only blocks
            have another, of GPTQ's act-order: inputs of one group become neighbours.
    """

    format: WeightFormat
    parts: tuple[Tensor, ...]
    inputs: int
    order: Tensor | None = None

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.parts[0].shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.itemsize for part in self.parts)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the value ``[outputs, inputs]``."""
        value = self.format.decode(self.parts, dtype)[:, : self.inputs]
        return value if self.order is None else value[:, self.order.argsort()]

    def joins(self, other: StoredWeight) -> bool:
        """Whether a weight of the same inputs can join: it has the same format and order."""
        return self.format.name == other.format.name and same_order(self.order, other.order)

    def join(self, others: Sequence[StoredWeight], rows: Rows = torch.cat) -> StoredWeight:
        """Join this weight and others that ``joins`` accepts: ``rows`` gets each part of all weights."""
        assert all(self.joins(other) for other in others), "weights of different formats do not join"
        together = zip(self.parts, *(other.parts for other in others), strict=True)
        return replace(self, parts=tuple(rows(list(parts)) for parts in together))

    def some_outputs(self, start: int, count: int) -> StoredWeight:
        """Return ``count`` outputs from ``start`` on."""
        return replace(self, parts=tuple(part[start : start + count] for part in self.parts))


def same_order(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two weights have one ``StoredWeight.order``."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """The weight of a linear layer, and its bias ``[outputs]``."""

    weight: StoredWeight
    bias: Tensor | None

    def join(self, *others: LinearWeights, rows: Rows = torch.cat) -> LinearWeights:
        """Join layers of the same input into one. Without a bias in each layer the result has none."""
        biases = [layer.bias for layer in (self, *others) if layer.bias is not None]
        bias = rows(biases) if len(biases) == 1 + len(others) else None
        return LinearWeights(self.weight.join([layer.weight for layer in others], rows), bias)


def choose_format(
    quantization: str | None, dtype: torch.dtype, device: torch.device, field: str = "quantization"
) -> WeightFormat:
    """Return the format of the options ``quantization`` and ``dtype`` on ``device``.

    Args:
        field: the user's name of ``quantization``.

    Raises:
        InvalidInput: no quantization has the name, or the device does not compute with the format.
    """
    formats = {name: WEIGHT_FORMATS.load(name)() for name in WEIGHT_FORMATS.names}
    if quantization is None:
        return next(each for each in formats.values() if each.dtype == dtype)
    check_quantization(quantization, field)
    found = formats[QUANTIZATION_ALIASES.get(quantization, quantization)]
    if device.type not in found.devices:
        raise wrong_quantization(quantization, field)
    return found


def bytes_of(format: WeightFormat, shapes: Sequence[Sequence[int]]) -> int:
    """Return the bytes of a model's tensors: linear weights in the format, vectors as embedding tables."""
    tables = sum(prod(shape) for shape in shapes if len(shape) < 2) * format.table_dtype.itemsize
    return tables + sum(format.num_bytes(prod(shape[:-1]), shape[-1]) for shape in shapes if len(shape) >= 2)
