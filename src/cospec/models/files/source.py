"""Sources of a model's weights: tensors by transformers' names, read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cospec.models.weights.format import StoredWeight, WeightFormat, bytes_of

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating dtypes by safetensors' names."""


class WeightSource(ABC):
    """The tensors of one model, in one or several files.

    Attributes:
        shapes: of all tensors by transformers' names.
        dtype: the most frequent floating dtype of the tensors; float32 where blocks are most frequent.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of weights in all tensors."""
        return sum(map(prod, self.shapes.values()))

    def num_bytes(self, format: WeightFormat) -> int:
        """Return the bytes of all tensors in memory, linear weights as ``linear`` returns them."""
        return bytes_of(format, tuple(self.shapes.values()))

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return the value of a tensor, in a floating dtype that holds the value exactly."""

    def linear(self, name: str, format: WeightFormat) -> StoredWeight:
        """Return a weight ``[out, in]`` in ``format``, or in the format of the file if ``format`` allows."""
        return format.read(self.read(name))

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all tensors as ``dtype``."""
        return {name: self.read(name).to(dtype) for name in self.shapes}


class SafetensorsSource(WeightSource):
    """Floating tensors of safetensors files. Tensors are mapped, and read when they are converted."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._open = [safe_open(str(file), framework="pt") for file in files]
        self._of = {name: handle for handle in self._open for name in handle.keys()}  # noqa: SIM118 - no mapping
        self.shapes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._of.items()}
        counts = Counter(str(handle.get_slice(name).get_dtype()) for name, handle in self._of.items())
        floating = {name: count for name, count in counts.items() if name in DTYPES}
        self.dtype = DTYPES[max(floating, key=lambda name: floating[name], default="F32")]

    def read(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        tensor: Tensor = self._of[name].get_tensor(name)
        return tensor


class ModuleSource(WeightSource):
    """The tensors of a loaded transformers model."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtype = next(iter(tensors.values())).dtype

    def read(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        return self._tensors[name].detach()
