"""Memory for KV caches: one amount for all models that run together, divided before any of them takes its part.

Shares go by the size of a token's keys and values, so that every cache holds equally many tokens: drafter and target
keep the same sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cospec.errors import InvalidInput, ModelError
from cospec.models.kv_cache import LayerShape, block_bytes
from cospec.system import available_memory

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """What caches may take.

    Attributes:
        total: bytes, for the caches of all models.
        token: bytes of a token's keys and values in all models together; None for a model that is alone.
        given: whether the user named ``total``; otherwise a cache takes no more than its sequences can fill.
    """

    total: int
    token: int | None = None
    given: bool = True


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What one model takes in memory, known before it is loaded.

    Attributes:
        weights: bytes.
        token: bytes of a token's keys and values.
    """

    weights: int
    token: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What models that run together will take, known before any of them is loaded.

    Attributes:
        weights: bytes of each model's weights, by the model's name.
        token_bytes: of one token's keys and values in all models.
        kv_cache_tokens: tokens that fit into the KV cache.
        max_model_len: tokens of the longest sequence.
        cut: why the longest sequence is shorter than the model's configuration says; empty where it is not.
        slow: why the fast forward does not run the model, as a clause behind "because"; empty where it does.
    """

    weights: Mapping[str, int]
    token_bytes: int
    kv_cache_tokens: int
    max_model_len: int
    cut: str = ""
    slow: str = ""

    @property
    def bytes(self) -> int:
        """Weights and KV cache together."""
        return sum(self.weights.values()) + self.token_bytes * self.kv_cache_tokens


def need_of(config: Any, weights: int, dtype: torch.dtype) -> MemoryNeed:
    """What a model with the text configuration ``config`` takes whose cache is held as ``dtype``."""
    heads = getattr(config, "num_attention_heads", None) or 0
    shared = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
    return MemoryNeed(weights, 2 * (getattr(config, "num_hidden_layers", None) or 0) * shared * dim * dtype.itemsize)


def divide(
    needs: Sequence[MemoryNeed], device: torch.device, utilization: float, given: int | None = None
) -> CacheBudget:
    """The budget of models that are about to be loaded.

    Args:
        utilization: share of a GPU's memory for weights and caches.
        given: bytes for all caches; None takes what the weights leave of a GPU, or a quarter of that on a CPU, at most
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
    """What one model wants of the budget.

    Attributes:
        length: tokens of its longest sequence.
        needed: tokens that must fit.
        sequences: at once.
    """

    length: int
    needed: int
    sequences: int


def pages_for(
    name: str, budget: CacheBudget, shapes: Sequence[LayerShape], dtype: torch.dtype, page_size: int, room: KVRoom
) -> int:
    """How many pages the model called ``name`` gets.

    Raises:
        InvalidInput: the bytes that the user gave hold less than one sequence.
        ModelError: the memory that is left does.
    """
    each = block_bytes(shapes, page_size, dtype)
    together = max(each, (budget.token or 0) * page_size)  # of a page in all models
    count = budget.total // together
    if count * page_size < room.needed:
        least = -(-room.needed // page_size) * together
        if budget.given:
            allowed = f"at least {least} for one sequence of {room.needed} tokens"
            raise InvalidInput("kv_cache_memory_bytes", budget.total, allowed)
        raise ModelError(
            f"There is no room for the KV cache of {name}: the weights leave {budget.total} bytes for caches, while "
            f"one sequence of {room.needed} tokens takes {least}; set a lower max_model_len, a higher "
            "gpu_memory_utilization, or kv_cache_memory_bytes."
        )
    return count if budget.given else min(count, room.sequences * -(-room.length // page_size))
