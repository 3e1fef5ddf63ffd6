"""Attention of a packed batch over KV pages: the base class of back ends.

A back end is prepared once per batch and called once per layer. The call writes the batch's keys and values into the
layer's pages, and returns the attention output of each row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cospec.errors import InvalidInput
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import LayerBlocks, LayerShape
from cospec.registry import ATTENTION_BACKENDS


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention parameters of a layer.

    Attributes:
        scale: factor of the products of queries and keys.
        window: a row attends keys at less than this distance; None for all.
        softcap: products pass through ``softcap * tanh(x / softcap)``; None for plain products.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


LayerAttend = Callable[[Tensor, Tensor, Tensor, LayerBlocks, AttentionShape], Tensor]
"""``(queries [T, H, D], keys [T, Hkv, D], values [T, Hkv, D], pages, heads) -> [T, H, D]``."""


class AttentionBackend(ABC):
    """A way to compute attention. An object has no state.

    Attributes:
        by_head: whether the KV cache stores the pages of a head contiguously, see ``KVCache``.
        capture_entries: the most cache entries of a captured batch, over all sequences; 0 if nothing can be captured.
        automatic: types of devices on which ``auto`` may choose this back end.
        native_forward: whether the native Llama forward attends with this back end's kernel.
    """

    name: ClassVar[str]
    by_head: ClassVar[bool]
    capture_entries: ClassVar[int] = 0
    automatic: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    native_forward: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, batch: InputBatch) -> LayerAttend:
        """Prepare the attention of one batch."""

    @abstractmethod
    def why_not(self, device: torch.device, shapes: Sequence[LayerShape], page_size: int) -> str:
        """Return why the back end cannot run layers of these shapes, as a clause; empty if supported."""

    def capture(self, batch: InputBatch) -> LayerAttend:
        """Prepare a batch of fixed size, with equally many rows per sequence, whose tensors get other contents later.

        Preparation and call take every value from the tensors, so that both can be captured as a CUDA graph. Only
        called if ``capture_entries`` is above 0.
        """
        raise NotImplementedError(f"the attention back end {self.name} captures nothing")


def choose_attention(name: str, device: torch.device, shapes: Sequence[LayerShape], page_size: int) -> AttentionBackend:
    """Return the back end ``name`` for a model on ``device``.

    ``auto`` is the first usable back end of the table that is ``automatic`` on the device.

    Raises:
        InvalidInput: the back end is unknown, or does not run on this machine.
    """
    backends = {each: ATTENTION_BACKENDS.load(each)() for each in ATTENTION_BACKENDS.names}
    reasons = {each: backend.why_not(device, shapes, page_size) for each, backend in backends.items()}
    usable = [each for each, reason in reasons.items() if not reason]
    if name == "auto":
        return next(backends[each] for each in usable if device.type in backends[each].automatic)
    if name in usable:
        return backends[name]
    because = f", because {reasons[name]}" if name in reasons else ""
    raise InvalidInput("attention_backend", name, f"auto or {' or '.join(usable)}{because}")
