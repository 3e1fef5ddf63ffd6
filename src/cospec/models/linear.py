"""Linear layers of a loaded model: the back ends, and the replacement of layers.

On a CPU sums are float32 for all weight formats. Stock products of a few rows cost about twice a product of one row.
Native and packed mkldnn products do not, and this difference decides whether speculation pays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cospec.errors import InvalidInput
from cospec.models.weights.format import ReadWeight, StoredWeight, WeightFormat
from cospec.native import operators

Build = Callable[[StoredWeight, Tensor | None], nn.Module]
"""``(weight [out, in], bias [out] or None) -> module``."""


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


class _RoundedInputs(nn.Module):
    """A float32 product of inputs that the weight format rounds."""

    def __init__(self, product: nn.Module, weight: StoredWeight) -> None:
        super().__init__()
        self.product, self._format, self._order = product, weight.format, weight.order

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.product(self._format.round_in_order(x, self._order))
        return result


class TableEmbedding(nn.Module):
    """An embedding stored in a dtype of fewer bits, with float32 output."""

    weight: Tensor

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", weight.to(dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).float()


def _stock(module: Callable[[Tensor, Tensor | None], nn.Module]) -> Build:
    """Build from the float32 value of a weight, for back ends that store only float32."""

    def build(weight: StoredWeight, bias: Tensor | None) -> nn.Module:
        product = module(weight.decode(), bias)
        return _RoundedInputs(product, weight) if weight.format.rounds_inputs else product

    return build


LINEAR: Mapping[str, Build] = MappingProxyType(
    {"native": operators.PackedLinear, "mkldnn": _stock(_Mkldnn), "torch": _stock(_Torch)}
)


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


def replace_linears(model: nn.Module, backend: str, format: WeightFormat, read: ReadWeight | None = None) -> None:
    """Replace the linear layers of a float32 model in place, the output layer included.

    Embeddings are stored in the format's ``table_dtype``. A tied output layer keeps sharing the embedding's weight with
    ``torch`` and float32 weights; otherwise the output layer has a copy.

    Args:
        read: reads a weight by the name of its module; None reads the module's own weight into ``format``.
    """
    if backend == "torch" and format.dtype is torch.float32 and read is None:
        return  # the model stays unchanged
    build = LINEAR[backend]
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            weight = weight_of(child)
            if weight is not None:
                bias = child.bias.detach() if isinstance(child.bias, Tensor) else None
                stored = read(f"{path}.{name}".lstrip("."), weight) if read else format.read(weight)
                setattr(parent, name, build(stored, bias))
            elif format.table_dtype is not torch.float32 and type(child) is nn.Embedding:
                setattr(parent, name, TableEmbedding(child.weight.detach(), format.table_dtype))


def weight_of(module: nn.Module) -> Tensor | None:
    """Return ``[out, in]`` of a linear layer, GPT-2's transposed layers included; None for other modules."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor) and module.weight.dim() == 2:
        return module.weight.detach().t().contiguous()
    return None
