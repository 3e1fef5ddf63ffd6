"""Sources of quantized safetensors: GPTQ, AWQ, compressed-tensors and fp8."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cospec.errors import ModelError
from cospec.models.files.packing_selection import choose_packing
from cospec.models.files.packings import PackedTensors
from cospec.models.files.source import FREQUENCIES, MULTIMODAL, PackedWeight, SafetensorsSource
from cospec.registry import WEIGHT_FORMATS


class QuantizedSafetensorsSource(SafetensorsSource):
    """Quantized linear layers become blocks where blocks can hold their values, and else floats.

    Layers that a checkpoint leaves unquantized, and all other tensors, are read unchanged.

    Args:
        config: of the quantization.
        kind: transformers' ``model_type``.

    Raises:
        ModelError: the quantization is unsupported.
    """

    packed = True

    def __init__(self, name: str, files: Sequence[Path], config: Mapping[str, Any], kind: str | None = None) -> None:
        super().__init__(files, kind in MULTIMODAL)
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
        layouts = {key: self._packing.layout(layer) for key, layer in self._layers.items()}
        known = {key: each for key, each in layouts.items() if each is not None and each.kind in WEIGHT_FORMATS}
        self.kinds = {key: each.kind for key, each in known.items()}
        self.orders = {key: each.order for key, each in known.items() if each.order is not None}
        self.quantized = {f"{module}.weight": self._packed(module) for module in packed}
        joins = kind == "qwen3_moe"  # transformers joins the experts of a layer, so blocks are joined too
        self._experts = _joined(self.shapes, self.kinds, self.orders) if joins else {}
        for joined, members in self._experts.items():
            shapes = [self.shapes.pop(member) for member in members]
            experts = len({_EXPERT.sub(r"\2", member) for member in members})
            self.shapes[joined] = (experts, sum(out for out, _ in shapes) // experts, shapes[0][1])
            self.kinds[joined] = {self.kinds.pop(member) for member in members}.pop()
            weights = [self.quantized.pop(member) for member in members]
            self.quantized[joined] = PackedWeight(self._packing.name, sum(each.bytes for each in weights))
        floats = {key for key in self.kinds if ".experts." in key} - self._experts.keys()  # see ``is_linear``
        self.kinds = {key: kind for key, kind in self.kinds.items() if key not in floats}
        self.orders = {key: order for key, order in self.orders.items() if key not in floats}

    def _layer(self, module: str) -> PackedTensors:
        shapes = {part: self.shapes.get(f"{module}.{part}") for part in self._packing.parts}
        read = partial(self._tensor, module)
        return PackedTensors(
            f"{self._name}: {module}", {part: shape for part, shape in shapes.items() if shape is not None}, read
        )

    def _packed(self, module: str) -> PackedWeight:
        sizes = [self.file_bytes(f"{module}.{part}") for part in self._packing.parts]
        return PackedWeight(self._packing.name, sum(sizes))

    def _tensor(self, module: str, part: str) -> Tensor:
        return super().read(f"{module}.{part}")

    def read(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        if name in self._experts:
            return torch.cat([self.read(member) for member in self._experts[name]]).view(self.shapes[name])
        return self._packing.decode(self._layers[name]) if name in self._layers else super().read(name)

    def has_rows(self, name: str) -> bool:
        """See ``WeightSource``."""
        return name not in self._layers and name not in self._experts

    def row(self, name: str, number: int) -> Tensor:
        """See ``WeightSource``."""
        return super().row(name, number) if self.has_rows(name) else self.read(name)[number]

    def blocks(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        if name in self._experts:
            return torch.cat([self.blocks(member) for member in self._experts[name]])
        return self._packing.blocks(self._layers[name])


_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_JOINED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}  # of transformers' layers


def _joined(names: Iterable[str], kinds: Mapping[str, str], orders: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the weights that make up the experts of a layer, expert after expert, by the joined weight's name.

    Blocks of different formats are not joined, and neither are inputs in orders of their own.
    """
    layers: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for name in names:
        if found := _EXPERT.fullmatch(name):
            layers[found[1]][int(found[2]), found[3]] = name
    joined = {}
    for layer, experts in layers.items():
        numbers = sorted({number for number, _ in experts})
        for to, parts in _JOINED.items():
            members = [experts.get((number, part), "") for number in numbers for part in parts]
            formats = {kinds.get(member) for member in members}
            if len(formats) == 1 and None not in formats and not orders.keys() & members:
                joined[f"{layer}.{to}"] = members
    return joined


# Scales of activations, which cospec rounds in its own way.
_UNUSED = (".input_scale", ".input_zero_point", ".k_scale", ".v_scale", ".output_scale", FREQUENCIES)
