"""Memory for KV caches: one amount for all models, divided before the first allocation.

Shares are proportional to the bytes of a token, so that every cache holds the same number of tokens. Drafter and target
keep the same sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cospec.errors import InvalidInput, ModelError
from cospec.machine import available_memory
from cospec.models.kv_cache import LayerShape, block_bytes
from cospec.models.kv_cache_formats import entry_width
from cospec.models.long_rope import original_length

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """The memory for KV caches.

    Attributes:
        total: bytes, for the caches of all models.
        token: bytes of a token's keys and values in all models together; None for a single model.
        given: whether the user set ``total``; else a cache takes at most the size that its sequences can fill.
    """

    total: int
    token: int | None = None
    given: bool = True


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory of one model, computed before the load.

    Attributes:
        weights: bytes.
        token: bytes of a token's keys and values.
    """

    weights: int
    token: int


@dataclass(frozen=True, slots=True)
class PlannedWeights:
    """The weights of one model: its name, the weight formats with their shares, and the bytes."""

    model: str
    formats: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of models that run together, computed before the load.

    Attributes:
        weights: of each model, the target's first.
        cache_dtypes: of the KV cache of each model.
        token_bytes: of one token's keys and values in all models.
        kv_cache_tokens: tokens that fit into the KV cache.
        max_model_len: tokens of the longest sequence.
        cut: why the longest sequence is shorter than in the model's configuration; empty if not.
        slow: why the fast forward cannot run the model, as a clause after "because"; empty if possible.
    """

    weights: tuple[PlannedWeights, ...]
    cache_dtypes: tuple[str, ...]
    token_bytes: int
    kv_cache_tokens: int
    max_model_len: int
    cut: str = ""
    slow: str = ""

    @property
    def bytes(self) -> int:
        """Weights and KV cache together."""
        return sum(each.bytes for each in self.weights) + self.token_bytes * self.kv_cache_tokens


def need_of(config: Any, weights: int, dtype: torch.dtype) -> MemoryNeed:
    """Return the memory of a model with the text configuration ``config`` and a cache of ``dtype``."""
    heads = getattr(config, "num_attention_heads", None) or 0
    shared = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
    layers = getattr(config, "num_hidden_layers", None) or 0
    return MemoryNeed(weights, 2 * layers * shared * entry_width(dim, dtype) * dtype.itemsize)


def divide(
    needs: Sequence[MemoryNeed], device: torch.device, utilization: float, given: int | None = None
) -> CacheBudget:
    """Compute the budget of models before their load.

    Args:
        utilization: share of a GPU's memory for weights and caches.
        given: bytes for all caches; None takes the rest of a GPU's share, or a quarter of the rest on a CPU, at most
            one GiB.
    """
    token = sum(need.token for need in needs) if len(needs) > 1 else None
    if given is not None:
        return CacheBudget(given, token)
    weights = sum(need.weights for need in needs)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return CacheBudget(max(int(free - (1 - utilization) * total) - weights, 0), token, given=False)
    return CacheBudget(min(max(available_memory() - weights, 0) // 4, _GIB), token, given=False)


@dataclass(frozen=True, slots=True)
class KVRoom:
    """The cache requirements of one model.

    Attributes:
        length: tokens of its longest sequence.
        needed: tokens that must fit.
        sequences: number of running sequences.
    """

    length: int
    needed: int
    sequences: int


def pages_for(
    name: str, budget: CacheBudget, shapes: Sequence[LayerShape], dtype: torch.dtype, page_size: int, room: KVRoom
) -> int:
    """Return the number of pages of the model ``name``.

    Raises:
        InvalidInput: the user's bytes hold less than one sequence.
        ModelError: the remaining memory holds less than one sequence.
    """
    each = block_bytes(shapes, page_size, dtype)
    together = max(each, (budget.token or 0) * page_size)  # bytes of a page in all models
    count = budget.total // together
    if count * page_size < room.needed:
        least = -(-room.needed // page_size) * together
        if budget.given:
            allowed = f"at least {least} for one sequence of {room.needed} tokens"
            raise InvalidInput("kv_cache_memory_bytes", budget.total, allowed)
        raise ModelError(
            f"The KV cache of {name} does not fit: the weights leave {budget.total} bytes for caches, while "
            f"one sequence of {room.needed} tokens takes {least}; set a lower max_model_len, a higher "
            "gpu_memory_utilization, or kv_cache_memory_bytes."
        )
    return count if budget.given else min(count, room.sequences * -(-room.length // page_size))


@dataclass(frozen=True, slots=True)
class Length:
    """The length limit of a sequence in tokens, and why the limit is below the configuration's."""

    allowed: int
    cut: str = ""


def length_of(config: Any, name: str, requested: int | None) -> Length:
    """Return the length limit of a sequence of the model ``name``: the model's positions, or the user's limit.

    Without a user's limit a long-rope model has its original length, see ``long_rope``.

    Raises:
        ModelError: the configuration has no limit, and the user gives none.
        InvalidInput: the model has fewer positions than the user requests.
    """
    limit: Any = getattr(config, "max_position_embeddings", None)
    kept = original_length(config) or limit
    if kept is None and requested is None:
        raise ModelError(f"The model {name} has no length limit in its configuration; set max_model_len.")
    if requested is not None and (requested < 2 or (limit is not None and requested > limit)):
        raise InvalidInput("max_model_len", requested, f"2 to {limit}, the positions of {name}")
    if requested is not None:
        return Length(int(requested))
    cut = f"its short long-rope factors hold for {kept} of its {limit} positions, and max_model_len allows more"
    return Length(int(kept), cut if kept != limit else "")
