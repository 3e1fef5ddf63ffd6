"""Options of loading a model, and their values for one model on one machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cospec.errors import InvalidInput
from cospec.models.files.source import WeightSource
from cospec.models.files.weight_source_selection import open_source
from cospec.models.kv_cache_formats import cache_dtype
from cospec.models.linear import choose_linear
from cospec.models.lora import AdapterFolder, base_folder, is_adapter, read_adapter
from cospec.models.memory import CacheBudget
from cospec.models.model_folder import check_stored, read_config, resolve
from cospec.models.part_source import LLAMA_NAMES, ModuleNames, PartSource
from cospec.models.shard import Shard
from cospec.models.weight_cache import NO_CACHE, WeightCache
from cospec.models.weights.format import TORCH_DTYPES, ReadWeight, StoredWeight, WeightFormat, choose_format
from cospec.plugin_options import ModelOptions


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
        kv_cache_dtype: of keys and values; ``auto`` is the dtype of the weights, or bfloat16 if a CPU
            multiplies quantized weights.
        keep_hidden_states: keep the hidden states of every forward in ``Model.hidden_states``.
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
    keep_hidden_states: bool = False
    shard: Shard = Shard()
    num_pages: int | None = None
    weight_cache: WeightCache = NO_CACHE

    def of_model(self, own: ModelOptions) -> LoadOptions:
        """Return these options with the own options of a drafter or member, for its own longest sequence."""
        options = replace(self, max_model_len=None, kv_cache_dtype=own.kv_cache_dtype or self.kv_cache_dtype)
        return replace(options, dtype=own.dtype or "auto", quantization=own.quantization) if own.given else options


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options made concrete for one model and one machine; ``adapter`` is merged into ``folder``'s weights.

    Attributes:
        fused: whether the hand-written forward reads the files, whose tensors have transformers' names.
        part: the same as ``source``, of a part of a model; see ``of_part``.
        slow: why transformers' layers hold the weights, as an ending of "because the model ..."; see
            ``planned_recipe``.
    """

    name: str
    folder: Path
    adapter: AdapterFolder | None
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    format: WeightFormat
    linear: str
    source: WeightSource
    options: LoadOptions
    fused: bool = False
    part: PartSource | None = None
    slow: str = ""

    @property
    def convert(self) -> bool:
        """Whether weights in blocks get another format; an adapter is merged into floats."""
        return self.options.quantization is not None or self.device.type != "cpu" or self.adapter is not None

    @property
    def formats(self) -> str:
        """The formats of the weights in memory, with their shares of the bytes."""
        return self.source.formats(self.format, self.convert)

    @property
    def in_layers(self) -> Recipe:
        """The same for counts, where transformers' layers hold the weights."""
        if self.device.type != "cpu":
            return self
        return replace(self, source=self.source.in_layers(self.format, self.linear == "native"))

    @property
    def expansion(self) -> str:
        """A sentence about quantized weights that become floats; empty without any."""
        names = self.source.expanded(self.format, self.convert)
        if not names:
            return ""
        packed = [self.source.quantized[name] for name in names]
        others = self.source.shapes.keys() - names
        size = self.source.num_bytes(self.format, self.convert, others)
        types = ", ".join(f"{count} in {type}" for type, count in Counter(each.type for each in packed).most_common())
        return (
            f"Quantized weights of {self.name} become floats, which take "
            f"{size / sum(each.bytes for each in packed):.1f} times their bytes: {types}."
        )

    @property
    def read(self) -> ReadWeight | None:
        """How linear weights are read from the source; None reads the tensors of a loaded model."""
        return self.source.reader(self.format, self.dtype, self.convert) if self.direct else None

    @property
    def table(self) -> StoredWeight | None:
        """The embedding in the file's blocks, if the hand-written forward reads it; None of other embeddings."""
        return self.source.table(self.convert) if self.direct else None

    @property
    def direct(self) -> bool:
        """Whether linear weights go from the files to their format, without a transformers module.

        An adapter is merged into modules. Names that transformers changes at load need its modules too.
        """
        return self.adapter is None and self.device.type == "cpu" and (self.source.packed or self.fused)

    def of_part(self, config: Any, names: ModuleNames = LLAMA_NAMES) -> Recipe:
        """Return the recipe that reads the weights of ``options.shard``; ``config`` is of the whole model."""
        shard = self.options.shard
        part = None if shard.whole else PartSource(self.source, config, shard, names)
        return self if part is None else replace(self, source=part, part=part)

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else self.dtype


def weights_dtype(found: Path, dtype: str = "auto") -> torch.dtype:
    """Return the dtype in memory of the weights in folder ``found``, loaded with ``dtype``.

    Raises:
        InvalidInput: the dtype is unknown.
    """
    if dtype == "auto":
        return open_source(base_folder(found)).dtype
    if dtype not in TORCH_DTYPES:
        raise InvalidInput("dtype", dtype, f"auto, {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[dtype]


def make_recipe(name: str, options: LoadOptions) -> Recipe:
    """Return the recipe of a model.

    Raises:
        ModelError, InvalidInput: as in ``loading.load_model``.
    """
    found = resolve(name)
    folder = base_folder(found)
    raw = read_config(folder)
    check_stored(name, raw)
    source = open_source(folder)
    device = choose_device(options.device)
    dtype = source.dtype if options.dtype == "auto" else weights_dtype(found, options.dtype)
    quantized = device.type == "cpu" and (bool(source.quantized) or options.quantization is not None)
    return Recipe(
        name=name,
        folder=folder,
        adapter=read_adapter(found) if is_adapter(found) else None,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype(options.kv_cache_dtype, dtype, quantized),
        format=choose_format(options.quantization, dtype, device),
        linear=choose_linear(options.linear_backend, device),
        source=source,
        options=options,
    )


def choose_device(name: str) -> torch.device:
    """Return the device of the option ``device``.

    Raises:
        InvalidInput: this machine has no such device.
    """
    usable = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    if name == "auto":
        return torch.device(usable[-1])
    if name not in usable:
        raise InvalidInput("device", name, f"auto or {' or '.join(usable)} on this machine")
    return torch.device(name)
