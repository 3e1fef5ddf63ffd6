"""Sources of quantized safetensors: GPTQ, AWQ, compressed-tensors and fp8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from cospec.errors import ModelError
from cospec.models.files.packing_selection import choose_packing
from cospec.models.files.packings import PackedTensors
from cospec.models.files.source import SafetensorsSource
from cospec.registry import WEIGHT_FORMATS


class QuantizedSafetensorsSource(SafetensorsSource):
    """Quantized linear layers become exact blocks where blocks can hold their values, and else floats.

    Layers that a checkpoint leaves unquantized, and all other tensors, are read unchanged.

    Raises:
        ModelError: the quantization is unsupported.
    """

    packed = True

    def __init__(self, name: str, files: Sequence[Path], config: Mapping[str, Any]) -> None:
        super().__init__(files)
        self._name = name
        self._packing = choose_packing(name, config)
        self.dtype = self._packing.dtype
        first, *others = self._packing.parts
        marks = [part for part in others if part not in ("weight", "g_idx")]
        modules = {key.rpartition(".")[0] for key in self.shapes if key.endswith(f".{first}")}
        packed = {module for module in modules if any(f"{module}.{mark}" in self.shapes for mark in marks)}
        if not packed:
            raise ModelError(f"The weights of {name} are not quantized as its configuration says: no {first} exists.")
        self._layers = {f"{module}.weight": self._layer(module) for module in packed}
        parts = {f"{module}.{part}" for module in packed for part in self._packing.parts}
        plain = {key: shape for key, shape in self.shapes.items() if key not in parts and not key.endswith(_UNUSED)}
        self.shapes = plain | {key: self._packing.shape(layer) for key, layer in self._layers.items()}
        kinds = {key: self._packing.kind(layer) for key, layer in self._layers.items()}
        self.kinds = {key: kind for key, kind in kinds.items() if kind is not None and kind in WEIGHT_FORMATS}

    def _layer(self, module: str) -> PackedTensors:
        shapes = {part: self.shapes.get(f"{module}.{part}") for part in self._packing.parts}
        read = partial(self._tensor, module)
        return PackedTensors(
            f"{self._name}: {module}", {part: shape for part, shape in shapes.items() if shape is not None}, read
        )

    def _tensor(self, module: str, part: str) -> Tensor:
        return super().read(f"{module}.{part}")

    def read(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        return self._packing.decode(self._layers[name]) if name in self._layers else super().read(name)

    def has_rows(self, name: str) -> bool:
        """See ``WeightSource``."""
        return name not in self._layers

    def row(self, name: str, number: int) -> Tensor:
        """See ``WeightSource``."""
        return self.read(name)[number] if name in self._layers else super().row(name, number)

    def blocks(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        return self._packing.blocks(self._layers[name])


# Scales of activations, which cospec rounds in its own way.
_UNUSED = (".input_scale", ".input_zero_point", ".k_scale", ".v_scale", ".output_scale", ".rotary_emb.inv_freq")
