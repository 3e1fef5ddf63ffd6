"""Options of loading a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cospec.models.memory import CacheBudget
from cospec.models.shard import Shard
from cospec.models.weight_cache import NO_CACHE, WeightCache
from cospec.options import ModelOptions


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of loading a model; the names are those of ``EngineConfig``.

    Attributes:
        dtype: of the weights in memory; ``auto`` keeps the file's. On a CPU sums and states are always float32;
            ``bfloat16`` rounds the inputs of products to bfloat16.
        max_model_len: tokens of one sequence; None is the model's limit, or the cache's capacity if smaller.
        cache_bytes: of the KV cache, or of all models' KV caches; None takes a share of the free memory.
        budget: the shared budget of several models, see ``cache_budget``; None for a single model.
        max_num_seqs: number of running sequences, which bounds an automatic cache size.
        fused: ``auto`` runs supported Llama-family models in the hand-written forward; ``never`` runs transformers.
        instruction_set: of the CPU kernels in the process that loads the model.
        kv_cache_dtype: of keys and values; ``auto`` is the dtype of the states.
        keep_states: keep the hidden states of every forward in ``Model.states``.
        shard: the part of the model to load, see ``load_stage``.
        num_pages: pages of the KV cache; None computes the number from the memory.
        weight_cache: of packed weights on disk; the default is off.
    """

    device: str = "auto"
    dtype: str = "auto"
    linear_backend: str = "auto"
    attention_backend: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    cache_bytes: int | None = None
    budget: CacheBudget | None = None
    max_num_seqs: int = 64
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = True
    page_size: int = 16
    fused: Literal["auto", "never"] = "auto"
    instruction_set: str = "auto"
    keep_states: bool = False
    shard: Shard = Shard()
    num_pages: int | None = None
    weight_cache: WeightCache = NO_CACHE

    def of_model(self, own: ModelOptions) -> LoadOptions:
        """Return these options with the own options of a drafter or member, for its own longest sequence."""
        options = replace(self, max_model_len=None, kv_cache_dtype=own.kv_cache_dtype or self.kv_cache_dtype)
        return replace(options, dtype=own.dtype or "auto", quantization=own.quantization) if own.given else options
