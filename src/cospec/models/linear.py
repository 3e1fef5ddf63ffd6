"""Linear layers of a loaded model: the back ends, and the replacement of layers.

On a CPU sums are float32 for all weight formats. Inputs are float32 too, except that bf16 weights round their inputs to
bf16, as GPUs do. Stock products of a few rows cost about twice a product of one row. Native and packed mkldnn products
do not, and this difference decides whether speculation pays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cospec.errors import InvalidInput
from cospec.native import operators
from cospec.native.operators import Kind

Build = Callable[[Tensor, Tensor | None, Kind], nn.Module]
"""``(weight [out, in], bias [out] or None, kind) -> module``."""


class _Torch(nn.Module):
    """Stock product; also for gradients and other dtypes."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Mkldnn(nn.Module):
    """oneDNN with a weight that is reordered once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
        self._bias = bias
        self._out = weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:  # oneDNN refuses an empty input
            return x.new_zeros(*x.shape[:-1], self._out)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result


class _Rounded(nn.Module):
    """A float32 product of inputs rounded to bfloat16."""

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.product(x.bfloat16().float())
        return result


class HalfEmbedding(nn.Module):
    """An embedding stored as bfloat16 with float32 output."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.to(torch.bfloat16))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).float()


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 8-bit weights ``[out, in]`` with scales ``[out, 1]``: symmetric, to nearest even."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(1e-8)
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def _as_float(weight: Tensor, kind: Kind) -> Tensor:
    """Return the float32 weight equal to ``kind``, for back ends that store only float32."""
    weight = weight.float()
    if kind == "int8":
        held, scale = round_int8(weight)
        return held * scale
    return weight.bfloat16().float() if kind == "bf16" else weight


def _native(weight: Tensor, bias: Tensor | None, kind: Kind) -> nn.Module:
    return operators.PackedLinear(weight, bias, kind)


def _stock(module: Callable[[Tensor, Tensor | None], nn.Module]) -> Build:
    def build(weight: Tensor, bias: Tensor | None, kind: Kind) -> nn.Module:
        product = module(_as_float(weight, kind), bias)
        return _Rounded(product) if kind == "bf16" else product

    return build


LINEAR: Mapping[str, Build] = MappingProxyType({"native": _native, "mkldnn": _stock(_Mkldnn), "torch": _stock(_Torch)})


def choose_linear(name: str, device: torch.device) -> str:
    """Return the back end ``name`` for ``device``; ``auto`` is the fastest available back end.

    Raises:
        InvalidInput: the back end is unknown, or does not run on this machine.
    """
    on_cpu = device.type == "cpu"
    usable = ["native"] if on_cpu and operators.available() else []
    usable += ["mkldnn"] if on_cpu and torch.backends.mkldnn.is_available() else []
    usable += ["torch"]
    if name == "auto":
        return usable[0]
    if name in usable:
        return name
    reason = f", since {operators.why_not()}" if name == "native" and on_cpu and operators.why_not() else ""
    raise InvalidInput("linear_backend", name, f"auto or {' or '.join(usable)} on this machine{reason}")


def replace_linears(model: nn.Module, backend: str, kind: Kind) -> None:
    """Replace the linear layers of a float32 model in place, the output layer included.

    ``int8`` weights are symmetric with one scale per output: a different model with another distribution. ``bf16`` also
    stores the embeddings as bfloat16. A tied output layer keeps sharing the embedding's weight with ``torch`` and
    ``fp32``; other back ends give the output layer a packed copy.
    """
    if backend == "torch" and kind == "fp32":
        return  # the model stays unchanged
    build = LINEAR[backend]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = weight_of(child)
            if weight is not None:
                bias = child.bias.detach() if isinstance(child.bias, Tensor) else None
                setattr(parent, name, build(weight, bias, kind))
            elif kind == "bf16" and type(child) is nn.Embedding:
                setattr(parent, name, HalfEmbedding(child.weight.detach()))


def weight_of(module: nn.Module) -> Tensor | None:
    """Return ``[out, in]`` of a linear layer, GPT-2's transposed layers included; None for other modules."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor) and module.weight.dim() == 2:
        return module.weight.detach().t().contiguous()
    return None
