"""The operations between products as Triton kernels: one launch each, where torch needs up to ten."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from cospec.models.pointwise import Rotation
from cospec.models.triton_pointwise_kernels import gate_kernel, heads_kernel, norm_kernel

GATE_BLOCK = 1024  # numbers of a program
WARP_NUMBERS = 512  # numbers of a row for each warp of its program
AS_WRITTEN: dict[str, Any] = {"enable_fp_fusion": False}  # every rounding is as written


class TritonPointwise:
    """See ``pointwise.Pointwise``; results differ from torch's in the order of sums."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Pointwise``."""
        return _norm(x.contiguous(), None, weight, eps)[1]

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``Pointwise``."""
        return _norm(x.contiguous(), branch.contiguous(), weight, eps)

    def heads(self, x: Tensor, norm: Tensor | None, rotation: Rotation | None, eps: float) -> Tensor:
        """See ``Pointwise``."""
        tokens, count, dim = x.shape
        if x.stride()[1:] != (dim, 1):
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        cos, sin = (out, out) if rotation is None else rotation
        rotated = 0 if rotation is None else 2 * cos.shape[-1]
        heads_kernel[(tokens, count)](
            x, out if norm is None else norm, cos, sin, out, x.stride(0), count, rotated, eps, DIM=dim,
            WIDTH=next_power_of_2(dim), NORM=norm is not None, ROTATE=rotated > 0, num_warps=1, **AS_WRITTEN,
        )  # fmt: skip
        return out

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """See ``Pointwise``."""
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
        grid = (rows, -(-size // GATE_BLOCK))
        gate_kernel[grid](gate_up, out, size, SILU=activation == "silu", BLOCK=GATE_BLOCK, **AS_WRITTEN)
        return out


def _norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum, and the normalised sum; without a branch the sum is ``x``."""
    size, out = x.shape[-1], torch.empty_like(x)
    added = x if branch is None else torch.empty_like(x)
    width = next_power_of_2(size)
    norm_kernel[(x.numel() // size,)](
        x, x if branch is None else branch, weight, added, out, size, eps, ADD=branch is not None, WIDTH=width,
        num_warps=min(16, max(1, width // WARP_NUMBERS)), **AS_WRITTEN,
    )  # fmt: skip
    return added, out
