"""The compiled kernels for models: products of a few rows, and attention over pages. CPU, float32.

A result depends on its own row alone, bit for bit: not on the number of rows, threads or the instruction set. Loading
the library, and the kernels over rows of logits, are in ``cospec.native.library``.
"""

from __future__ import annotations

import weakref
from typing import Literal

import torch
from torch import Tensor, nn

from cospec.errors import InvalidInput, words
from cospec.models.input_batch import InputBatch
from cospec.native import structs
from cospec.native.library import available, cdll, isa, set_isa, set_threads, threads, why_not

__all__ = [
    "Kind",
    "PackedLinear",
    "attention",
    "available",
    "isa",
    "cdll",
    "rms_norm",
    "set_isa",
    "set_threads",
    "threads",
    "why_not",
]

Kind = Literal["fp32", "bf16", "int8"]
_ATTENTION = structs.packer(structs.AttentionParams)
KINDS = {"fp32": 0, "bf16": 1, "int8": 2}
MAX_DIM = 256  # of a head


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with the weight packed for the kernels, a copy of its own.

    Args:
        weight: ``[out, in]``, any floating dtype; rounded to the format ``kind``.
        bias: ``[out]`` or None.
        kind: how the weight is held. ``int8`` is symmetric with one scale per output, rounded to nearest even. With
            ``bf16`` inputs are rounded to bf16 too; sums are float32 with every kind.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Kind) -> None:
        super().__init__()
        if kind not in KINDS:
            raise InvalidInput("linear kind", kind, "fp32, bf16 or int8")
        if weight.dim() != 2 or weight.numel() == 0:
            raise InvalidInput("weight", words(f"of shape {tuple(weight.shape)}"), "[out, in] with neither empty")
        self.kind = kind
        self.out_features, self.in_features = weight.shape
        packed, scale = quantize(weight.detach().cpu(), kind)
        shift = None if bias is None else bias.detach().cpu().float().contiguous()
        found = cdll()
        self.handle: int = found.cospec_linear_new(
            KINDS[kind], packed.data_ptr(), _pointer(scale), _pointer(shift), self.out_features, self.in_features
        )
        self._product = found.cospec_linear
        weakref.finalize(self, found.cospec_linear_free, self.handle)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 ``[..., in]`` to ``[..., out]``."""
        shape = x.shape
        if x.dtype != torch.float32 or shape[-1] != self.in_features or x.device.type != "cpu":
            given = words(f"{x.dtype} of shape {tuple(shape)} on {x.device}")
            raise InvalidInput("input of a packed linear layer", given, f"float32 [..., {self.in_features}] on the CPU")
        x = x.contiguous()
        y = torch.empty((*shape[:-1], self.out_features))
        self._product(self.handle, x.data_ptr(), x.numel() // self.in_features, y.data_ptr())
        return y


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """``weight [out, in]`` as ``kind`` holds it; with its scales ``[out]`` for ``int8``, else None."""
    if kind == "fp32":
        return weight.float().contiguous(), None
    if kind == "bf16":
        return weight.to(torch.bfloat16).contiguous(), None
    weight = weight.float()
    scale = (weight.abs().amax(1) / 127).clamp_min(1e-8)
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8).contiguous(), scale.contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def attention(  # noqa: PLR0913 - a layer's whole attention, called once per layer from one place
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: InputBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write the batch's keys and values into their pages, then attend.

    Args:
        q: float32 ``[T, H, D]``; ``k`` and ``v`` ``[T, Hkv, D]``. Rows and heads may lie any distance apart.
        k_pages, v_pages: float32 ``[pages, Hkv, page_size, D]``, contiguous; ``page_size`` and ``D`` divide by 8.
        window: a row attends keys less than this many positions back.
        softcap: products pass through ``softcap * tanh(x / softcap)``.

    Returns:
        ``[T, H, D]``.
    """
    q, k, v = (x if x.stride(2) == 1 and x.dtype == torch.float32 else x.float().contiguous() for x in (q, k, v))
    rows, heads, dim = q.shape
    _check_pages(k_pages, v_pages, k, batch)
    out = torch.empty(rows, heads, dim)
    params = _ATTENTION.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        k_pages.data_ptr(), v_pages.data_ptr(), out.data_ptr(),
        heads, k.shape[1], dim, batch.page_size, batch.tables.shape[1],
        scale, softcap or 0.0, window or 0,
        batch.positions.data_ptr(), batch.visible.data_ptr(), batch.tables.data_ptr(), batch.starts.data_ptr(),
        batch.write_at.data_ptr(), batch.mask.data_ptr(), batch.tables.shape[0],
    )  # fmt: skip
    cdll().cospec_attention(params)
    return out


def _check_pages(k_pages: Tensor, v_pages: Tensor, k: Tensor, batch: InputBatch) -> None:
    _, kv_heads, page_size, dim = k_pages.shape
    fits = (kv_heads, page_size, dim) == (k.shape[1], batch.page_size, k.shape[2]) and v_pages.shape == k_pages.shape
    plain = k_pages.is_contiguous() and v_pages.is_contiguous() and k_pages.dtype == v_pages.dtype == torch.float32
    if not (fits and plain) or page_size % 8 or dim % 8 or dim > MAX_DIM:
        given = words(f"{k_pages.dtype} of shape {tuple(k_pages.shape)}")
        allowed = "contiguous float32 [pages, Hkv, page_size, D], page_size and D multiples of 8, D at most 256"
        raise InvalidInput("KV cache of the native attention", given, allowed)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension; float32 ``[..., n]`` and ``[n]``."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    width = weight.numel()
    cdll().cospec_rms_norm(x.data_ptr(), weight.data_ptr(), eps, x.numel() // width, width, y.data_ptr())
    return y
