"""The operations between the products of a Llama forward: norms, rotary embeddings, activations, and their sums.

Every result is rounded to the dtype of the states where transformers rounds it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cospec import triton_support

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines ``[T, R / 2]``, float32, of the first ``R`` numbers of a head."""


class Pointwise(Protocol):
    """An implementation; norms compute in float32, and their weights are float32."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise ``[T, H]`` by the root of the mean square."""

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``x + branch``, and the normalised sum."""

    def heads(self, x: Tensor, norm: Tensor | None, rotation: Rotation | None, eps: float) -> Tensor:
        """Normalise each head of ``[T, heads, D]``, and rotate its first numbers."""

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return ``activation(gate) * up`` of ``[T, 2 I]``, whose first half is the gate."""


class TorchPointwise:
    """The operations in torch, on any device."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Pointwise``."""
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``Pointwise``."""
        x = x + branch
        return x, self.norm(x, weight, eps)

    def heads(self, x: Tensor, norm: Tensor | None, rotation: Rotation | None, eps: float) -> Tensor:
        """See ``Pointwise``."""
        if norm is not None:
            x = self.norm(x, norm, eps)
        if rotation is None:
            return x
        cos, sin = (part[:, None] for part in rotation)
        rotated = 2 * cos.shape[-1]
        a, b = x[..., :rotated].float().chunk(2, dim=-1)
        parts = [a * cos - b * sin, b * cos + a * sin]
        rest = [x[..., rotated:].float()] if rotated < x.shape[-1] else []
        return torch.cat(parts + rest, dim=-1).to(x.dtype)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """See ``Pointwise``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def pointwise_on(device: torch.device) -> Pointwise:
    """Return the fastest implementation for a device."""
    if device.type == "cuda" and not triton_support.why_not(device):
        from cospec.models.triton_pointwise import TritonPointwise

        return TritonPointwise()
    return TorchPointwise()
