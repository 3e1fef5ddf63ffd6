"""The entries of a KV cache in each dtype.

An entry is the key or the value of one token and head. The entry depends on its own numbers alone and is rounded once,
so all batches read the same entries. ``csrc/ops/cache_formats.h`` writes the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

CACHE_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int8")
}
"""The values of the option ``kv_cache_dtype`` besides ``auto``."""

SCALE_BYTES = 4  # of the float32 scale after the numbers of an int8 entry
LEAST = 1e-30  # int8 entries of smaller numbers are 0


def cache_dtype(name: str, weights: torch.dtype, quantized: bool) -> torch.dtype:
    """Return the dtype of the option ``kv_cache_dtype``.

    ``auto`` is the dtype of the weights, or bfloat16 where a CPU multiplies quantized weights.
    """
    if name != "auto":
        return CACHE_DTYPES[name]
    return torch.bfloat16 if quantized else weights


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as the option has it."""
    return str(dtype).removeprefix("torch.")


def entry_width(dim: int, dtype: torch.dtype) -> int:
    """Return the elements of an entry of ``dim`` numbers."""
    return dim + SCALE_BYTES if dtype is torch.int8 else dim


def encode(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round numbers ``[..., D]`` to entries ``[..., W]`` of ``dtype``, see ``entry_width``.

    The largest number of an int8 entry becomes 127 or -127. A number that is not finite makes the scale NaN.
    """
    if dtype is not torch.int8:
        return numbers.to(dtype)
    numbers = numbers.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    finite, zero = largest.isfinite(), largest < LEAST
    factor = torch.where(finite & ~zero, 127.0 / largest, 0.0)
    scale = torch.where(finite, torch.where(zero, 0.0, largest / 127.0), float("nan"))
    integers = torch.where(finite, numbers * factor, 0.0).round().to(torch.int8)
    return torch.cat([integers, scale.contiguous().view(torch.int8)], -1)


def decode(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers ``[..., D]`` of entries ``[..., W]``."""
    if entries.dtype is not torch.int8:
        return entries.to(dtype)
    scale = entries[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (entries[..., :-SCALE_BYTES].float() * scale).to(dtype)
