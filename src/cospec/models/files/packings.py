"""How quantized checkpoints pack their linear weights: GPTQ, AWQ, compressed-tensors and fp8.

A packing gives the integers, zero points and scales of a weight: ``weight[o, i] = scale[o, g] * (integer[o, i] -
zero[o, g])``, where ``g = group[i]``. Each class names the packing's definition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from cospec.errors import ModelError


class PackedTensors:
    """The tensors of one linear layer, by the last part of their names; a tensor is read when it is needed.

    Attributes:
        name: of the layer and its folder, for errors.
    """

    def __init__(self, name: str, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> None:
        self.name, self.shapes, self._read = name, shapes, read

    def __contains__(self, part: str) -> bool:
        return part in self.shapes

    def __getitem__(self, part: str) -> Tensor:
        return self._read(part)

    def refused(self, part: str, allowed: str) -> ModelError:
        """Return the error about the shape of a tensor."""
        return ModelError(f"The tensor {self.name}.{part} has shape {list(self.shapes[part])}; allowed is {allowed}.")


class BlockLayout(NamedTuple):
    """How blocks hold a weight.

    Attributes:
        kind: the block format.
        order: int64 ``[in]``, the inputs sorted by group, as blocks hold them; None where they are sorted already.
    """

    kind: str
    order: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Scheme:
    """What the integers of a weight mean.

    Attributes:
        bits: of an integer, which is unsigned in the file.
        scales: float32 ``[out, groups]``.
        zeros: int16 ``[out, groups]``.
        groups: int64 ``[in]``: the group of each input.
    """

    bits: int
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def layout(self) -> BlockLayout | None:
        """The blocks that hold the weight: ``q4_0``, ``q4_1``, ``q8_0``, or None.

        Their values are exact, but for the minimums of ``q4_1``: ``- scale * zero``, rounded to float16.
        """
        groups, order = self.groups.sort(stable=True)
        inputs = groups.view(-1, 32) if len(groups) % 32 == 0 else None
        aligned = inputs is not None and bool((inputs == inputs[:, :1]).all())
        if not aligned or not torch.equal(self.scales.half().float(), self.scales):
            return None
        own = None if torch.equal(groups, self.groups) else order
        if bool((self.zeros == 1 << self.bits - 1).all()):
            return BlockLayout("q4_0" if self.bits <= 4 else "q8_0", own)
        minimums = self.bits <= 4 and bool(self._minimums().isfinite().all())
        return BlockLayout("q4_1", own) if minimums else None

    def _minimums(self) -> Tensor:
        """Return the weights of the integer 0, float16 ``[out, groups]``."""
        return (-self.scales * self.zeros).half()

    def decode(self, integers: Tensor) -> Tensor:
        """Return the weight ``[out, in]``, float32."""
        return (integers - self.zeros[:, self.groups]).float() * self.scales[:, self.groups]

    def blocks(self, integers: Tensor) -> Tensor:
        """Return the weight in file blocks of ``layout``, uint8 ``[out, bytes of a row]``."""
        layout = self.layout
        assert layout is not None, "no blocks hold the weight"
        groups, order = self.groups, layout.order
        if order is not None:
            groups, integers = groups[order], integers[:, order]
        numbers = [self.scales.half()] if layout.kind != "q4_1" else [self.scales.half(), self._minimums()]
        heads = torch.stack([each[:, groups[::32]] for each in numbers], -1).view(torch.uint8)
        if layout.kind == "q8_0":
            packed = (integers - 128).to(torch.int8).view(torch.uint8).unflatten(1, (-1, 32))
        else:
            centre = 8 - (1 << self.bits - 1) if layout.kind == "q4_0" else 0
            nibbles = (integers + centre).to(torch.uint8).unflatten(1, (-1, 32))
            packed = nibbles[..., :16] | nibbles[..., 16:] << 4
        return torch.cat([heads, packed], -1).flatten(1)


class Packing(ABC):
    """The packing of one kind of checkpoint.

    Attributes:
        name: of the packing.
        parts: names of a layer's tensors; the first is the weight, the others need not exist.
        dtype: holds the values of the weight.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    dtype: ClassVar[torch.dtype] = torch.float32

    @abstractmethod
    def shape(self, layer: PackedTensors) -> tuple[int, int]:
        """Return ``(out, in)`` of a layer."""

    @abstractmethod
    def decode(self, layer: PackedTensors) -> Tensor:
        """Return the weight ``[out, in]``."""

    def layout(self, layer: PackedTensors) -> BlockLayout | None:
        """Return the blocks that hold the weight, from all tensors but the first; None without any."""
        return None

    def blocks(self, layer: PackedTensors) -> Tensor:
        """Return the weight in file blocks of ``layout``."""
        raise NotImplementedError


class IntegerPacking(Packing):
    """A packing of integers."""

    @abstractmethod
    def integers(self, layer: PackedTensors) -> Tensor:
        """Return the unsigned integers ``[out, in]``, int16."""

    @abstractmethod
    def scheme(self, layer: PackedTensors) -> Scheme:
        """Return the meaning of the integers, from all tensors but the first."""

    def decode(self, layer: PackedTensors) -> Tensor:
        """See ``Packing``."""
        return self.scheme(layer).decode(self.integers(layer))

    def layout(self, layer: PackedTensors) -> BlockLayout | None:
        """See ``Packing``."""
        return self.scheme(layer).layout

    def blocks(self, layer: PackedTensors) -> Tensor:
        """See ``Packing``."""
        return self.scheme(layer).blocks(self.integers(layer))


def unpack(packed: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the unsigned integers in words of 32 bits along ``dim``, the lowest bits first; int16.

    Args:
        order: place in its word of the integer that each group of bits holds.
    """
    count = 32 // bits
    words = packed.movedim(dim, -1).to(torch.int64).unsqueeze(-1)
    integers = (words >> torch.arange(0, 32, bits)) & ((1 << bits) - 1)
    if order is not None:
        integers = integers[..., torch.argsort(torch.tensor(order))]
    return integers.flatten(-2).movedim(-1, dim).to(torch.int16) if count > 1 else packed.to(torch.int16)


def as_matrix(layer: PackedTensors, part: str, out: int) -> Tensor:
    """Return numbers of a tensor, of outputs or of groups as ``[out, groups]``.

    Raises:
        ModelError: the numbers are of something else.
    """
    numbers = layer[part]
    matrix = numbers if numbers.dim() == 2 else numbers.reshape(-1, 1)
    if matrix.shape[0] not in (1, out) or numbers.dim() > 2:
        raise layer.refused(part, f"[1], [{out}] or [{out}, groups]")
    return matrix.expand(out, -1).contiguous()


def even_groups(layer: PackedTensors, part: str, inputs: int, count: int, size: int | None) -> Tensor:
    """Return the group of each input, for groups of ``size`` neighbours, of which the last may be shorter.

    Args:
        part: tensor with ``count`` scales for each output.
        size: from the configuration; None means groups of one size.

    Raises:
        ModelError: ``inputs`` do not make ``count`` groups.
    """
    if count == 1:
        return torch.zeros(inputs, dtype=torch.int64)
    if size is None and inputs % count:
        raise layer.refused(part, f"a number of groups that divides {inputs} inputs, or group_size in config.json")
    size = size or inputs // count
    if -(-inputs // size) != count:
        raise layer.refused(part, f"{-(-inputs // size)} groups of {size} for {inputs} inputs")
    return torch.arange(inputs) // size


@dataclass(frozen=True)
class Gptq(IntegerPacking):
    """GPTQ (Frantar et al. 2022, 2210.17323) in AutoGPTQ's files.

    ``qweight [in / n, out]`` packs along the inputs, ``qzeros [groups, out / n]`` along the outputs. Version 1 stores
    zero points minus one.
    """

    bits: int
    version: int
    group_size: int | None = None
    name = "gptq"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def shape(self, layer: PackedTensors) -> tuple[int, int]:
        """See ``Packing``."""
        rows, out = layer.shapes["qweight"]
        return out, rows * 32 // self.bits

    def integers(self, layer: PackedTensors) -> Tensor:
        """See ``IntegerPacking``."""
        return unpack(layer["qweight"], self.bits, 0).t().contiguous()

    def scheme(self, layer: PackedTensors) -> Scheme:
        """See ``IntegerPacking``."""
        zeros = unpack(layer["qzeros"], self.bits, 1)
        if self.version == 1:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        scales = layer["scales"].float().t().contiguous()
        _, inputs = self.shape(layer)
        groups = (
            layer["g_idx"].long()
            if "g_idx" in layer
            else even_groups(layer, "scales", inputs, scales.shape[1], self.group_size)
        )
        return Scheme(self.bits, scales, zeros.t().contiguous(), groups)


@dataclass(frozen=True)
class Awq(IntegerPacking):
    """AWQ (Lin et al. 2023, 2306.00978) in AutoAWQ's files of version ``gemm``.

    ``qweight [in, out / 8]`` and ``qzeros [groups, out / 8]`` pack eight outputs, in the order 0 2 4 6 1 3 5 7.
    """

    group_size: int | None = None
    name = "awq"
    parts = ("qweight", "qzeros", "scales")
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def shape(self, layer: PackedTensors) -> tuple[int, int]:
        """See ``Packing``."""
        inputs, words = layer.shapes["qweight"]
        return words * 8, inputs

    def integers(self, layer: PackedTensors) -> Tensor:
        """See ``IntegerPacking``."""
        return unpack(layer["qweight"], 4, 1, self.order).t().contiguous()

    def scheme(self, layer: PackedTensors) -> Scheme:
        """See ``IntegerPacking``."""
        zeros = unpack(layer["qzeros"], 4, 1, self.order).t().contiguous()
        scales = layer["scales"].float().t().contiguous()
        groups = even_groups(layer, "scales", self.shape(layer)[1], scales.shape[1], self.group_size)
        return Scheme(4, scales, zeros, groups)


@dataclass(frozen=True)
class PackedIntegers(IntegerPacking):
    """compressed-tensors' ``pack-quantized``: words of 32 bits along the inputs, signed integers plus half the range.

    ``weight_zero_point [out / n, groups]`` packs along the outputs, except a zero point of the whole tensor, which is
    int8. ``weight_shape`` holds ``(out, in)``.
    """

    bits: int
    group_size: int | None = None
    name = "pack-quantized"
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def shape(self, layer: PackedTensors) -> tuple[int, int]:
        """See ``Packing``."""
        out, words = layer.shapes["weight_packed"]
        return out, words * 32 // self.bits

    def integers(self, layer: PackedTensors) -> Tensor:
        """See ``IntegerPacking``."""
        out, inputs = (int(each) for each in layer["weight_shape"])
        return unpack(layer["weight_packed"], self.bits, 1)[:out, :inputs]

    def scheme(self, layer: PackedTensors) -> Scheme:
        """See ``IntegerPacking``."""
        out, inputs = (int(each) for each in layer["weight_shape"])
        scales = as_matrix(layer, "weight_scale", out).float()
        groups = (
            layer["weight_g_idx"].long()
            if "weight_g_idx" in layer
            else even_groups(layer, "weight_scale", inputs, scales.shape[1], self.group_size)
        )
        return Scheme(self.bits, scales, self._zeros(layer, scales, out), groups)

    def _zeros(self, layer: PackedTensors, scales: Tensor, out: int) -> Tensor:
        """Return the zero points ``[out, groups]``."""
        half = 1 << self.bits - 1
        if "weight_zero_point" not in layer:
            return torch.full(scales.shape, half, dtype=torch.int16)
        if layer["weight_zero_point"].dtype == torch.int8:
            zeros = as_matrix(layer, "weight_zero_point", out).to(torch.int16) + half
        else:
            zeros = unpack(layer["weight_zero_point"], self.bits, 0)[:out]
        if zeros.shape != scales.shape:
            raise layer.refused("weight_zero_point", f"a zero point for each scale of {list(scales.shape)}")
        return zeros


@dataclass(frozen=True)
class PlainIntegers(IntegerPacking):
    """compressed-tensors' ``int-quantized``: int8 weights and a scale per tensor, output or group."""

    group_size: int | None = None
    name = "int-quantized"
    parts = ("weight", "weight_scale", "weight_zero_point")

    def shape(self, layer: PackedTensors) -> tuple[int, int]:
        """See ``Packing``."""
        out, inputs = layer.shapes["weight"]
        return out, inputs

    def integers(self, layer: PackedTensors) -> Tensor:
        """See ``IntegerPacking``."""
        return layer["weight"].to(torch.int16) + 128

    def scheme(self, layer: PackedTensors) -> Scheme:
        """See ``IntegerPacking``."""
        out, inputs = self.shape(layer)
        scales = as_matrix(layer, "weight_scale", out).float()
        zeros = torch.zeros_like(scales)
        if "weight_zero_point" in layer:
            zeros = as_matrix(layer, "weight_zero_point", out)
        groups = even_groups(layer, "weight_scale", inputs, scales.shape[1], self.group_size)
        return Scheme(8, scales, zeros.to(torch.int16) + 128, groups)


@dataclass(frozen=True)
class Fp8(Packing):
    """Float8 weights, and scales of the tensor, of outputs, or of tiles (``weight_scale_inv`` of DeepSeek).

    Attributes:
        tile: outputs and inputs of a tile; the last tiles may be smaller.
    """

    tile: tuple[int, int] = (128, 128)
    name = "fp8"
    parts = ("weight", "weight_scale", "weight_scale_inv")
    dtype = torch.bfloat16

    def shape(self, layer: PackedTensors) -> tuple[int, int]:
        """See ``Packing``."""
        out, inputs = layer.shapes["weight"]
        return out, inputs

    def decode(self, layer: PackedTensors) -> Tensor:
        """See ``Packing``; products are rounded to bfloat16."""
        weight = layer["weight"].float()
        part = "weight_scale" if "weight_scale" in layer else "weight_scale_inv"
        scale, (out, inputs) = layer[part].float(), weight.shape
        if scale.numel() == 1 or scale.shape in ((out,), (out, 1)):
            return (weight * scale.reshape(-1, 1)).bfloat16()
        tiles = (-(-out // self.tile[0]), -(-inputs // self.tile[1]))
        if scale.shape != tiles:
            size = " x ".join(map(str, self.tile))
            raise layer.refused(part, f"[1], [{out}] or {list(tiles)}, a scale for each tile of {size}")
        whole = scale.repeat_interleave(self.tile[0], 0).repeat_interleave(self.tile[1], 1)
        return (weight * whole[:out, :inputs]).bfloat16()
