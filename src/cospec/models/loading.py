"""Turns a model's name into a running model: options, weights, cache, back ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from cospec.core.interfaces import Model
from cospec.models.attention.backend import AttentionBackend, choose_attention
from cospec.models.block_manager import BlockPool
from cospec.models.families import has_experts, why_not
from cospec.models.files.array_file import ArrayMemory, PackedModel
from cospec.models.files.source import HEAD, OUTPUT_EMBEDDINGS
from cospec.models.hf_loading import load_tokenizer, model_config
from cospec.models.hf_logging import hf_logging_off, weights_progress
from cospec.models.kv_cache import KVCache, LayerShape
from cospec.models.kv_cache_formats import dtype_name
from cospec.models.linear import replace_linears
from cospec.models.llama import FusedLlama, TorchStage
from cospec.models.llama_weights import LlamaWeights
from cospec.models.load_options import LoadOptions, Recipe, choose_device, make_recipe, weights_dtype
from cospec.models.long_rope import fix_frequencies
from cospec.models.memory import (
    CacheBudget,
    KVRoom,
    MemoryNeed,
    MemoryPlan,
    PlannedWeights,
    divide,
    length_of,
    need_of,
    pages_for,
)
from cospec.models.model_folder import configurations, resolve, weight_files
from cospec.models.model_runner import ModelRunner, check_numbers
from cospec.models.part_source import ModuleNames, check_columns
from cospec.models.shard import SumShards, check_shards, shard_config
from cospec.models.stage import PythonStage, StageForward
from cospec.models.weight_cache import NO_CACHE
from cospec.models.weight_loading import fixed_hf_config, load_hf_weights, load_llama_weights
from cospec.models.weights.format import same_order
from cospec.native import llama_weight_packing
from cospec.native.library import release_memory

__all__ = [
    "LoadOptions",
    "cache_budget",
    "check_division",
    "load_model",
    "load_stage",
    "load_tokenizer",
    "memory_plan",
    "resolve",
    "weights_dtype",
]

log = logging.getLogger(__name__)


def load_model(name: str, options: LoadOptions = LoadOptions()) -> Model:
    """Load the model ``name``, see ``resolve``; a LoRA adapter is merged into its base.

    Raises:
        ModelError: the model is not found, unreadable, unsupported, or gives NaN logits.
        InvalidInput: an option does not fit the model or the machine.
    """
    recipe = make_recipe(name, options)
    size = sum(file.stat().st_size for file in weight_files(recipe.folder))
    with weights_progress(recipe.name, size):
        model = _assemble(recipe)
    release_memory()
    check_numbers(model, recipe.name)
    return model


def cache_budget(models: Sequence[tuple[str, LoadOptions]]) -> CacheBudget:
    """Return the shared KV cache budget of models, computed before the first load.

    Args:
        models: name and options of each; device and memory are those of the first.

    Raises:
        ModelError, InvalidInput: as in ``load_model``.
    """
    _, options = models[0]
    needs = [_need(planned_recipe(name, own)) for name, own in models]
    return divide(needs, choose_device(options.device), options.gpu_memory_utilization, options.cache_bytes)


def memory_plan(models: Sequence[tuple[str, LoadOptions]]) -> MemoryPlan:
    """Plan the memory of models.

    Args:
        models: name and options of each; the first is the target.

    Raises:
        ModelError, InvalidInput: as in ``load_model``, also if memory does not suffice.
    """
    _, options = models[0]
    recipes = [planned_recipe(name, own) for name, own in models]
    needs = [_need(recipe) for recipe in recipes]
    target, config = recipes[0], model_config(recipes[0].name, recipes[0].folder)
    length = length_of(config.get_text_config(), target.name, options.max_model_len)
    token = sum(need.token for need in needs)
    budget = divide(needs, target.device, options.gpu_memory_utilization, options.cache_bytes)
    room = KVRoom(length.allowed, length.allowed if options.max_model_len is not None else 2, options.max_num_seqs)
    pages = pages_for(target.name, replace(budget, token=token), (), target.cache_dtype, options.page_size, room)
    return MemoryPlan(
        weights=tuple(
            PlannedWeights(recipe.name, recipe.formats, need.weights)
            for recipe, need in zip(recipes, needs, strict=True)
        ),
        cache_dtypes=tuple(dtype_name(recipe.cache_dtype) for recipe in recipes),
        token_bytes=token,
        kv_cache_tokens=pages * options.page_size,
        max_model_len=min(length.allowed, pages * options.page_size),
        cut=length.cut,
        slow=target.slow,
    )


def planned_recipe(name: str, options: LoadOptions) -> Recipe:
    """Return the recipe of a model for counts: its source holds what will be in memory. Raises as ``load_model``."""
    recipe = make_recipe(name, options)
    slow = _why_not_fused(model_config(recipe.name, recipe.folder), recipe)
    return replace(recipe.in_layers, slow=slow) if slow else recipe


def _need(recipe: Recipe) -> MemoryNeed:
    weights = recipe.source.num_bytes(recipe.format, recipe.convert)
    return need_of(model_config(recipe.name, recipe.folder).get_text_config(), weights, recipe.cache_dtype)


def _assemble(recipe: Recipe) -> Model:
    config = fix_frequencies(model_config(recipe.name, recipe.folder), recipe.options.max_model_len)
    reason = _why_not_fused(config, recipe)
    _log_forward(recipe, reason)
    if not reason:
        return _fused_model(config, recipe)
    from cospec.models import hf  # imports most of torch

    with hf_logging_off():
        config = fixed_hf_config(recipe)
        model = load_hf_weights(config, recipe, recipe.state_dtype)
        if recipe.device.type == "cpu":
            replace_linears(model, recipe.linear, recipe.format, recipe.read)
        shapes = hf.probe(model)
        attention, cache, max_len = _checked(model, shapes, config, recipe)
    return hf.packed_model(recipe.name, model, cache, attention, max_len, recipe.options.keep_hidden_states)


def _checked(
    model: Any, shapes: list[LayerShape], config: Any, recipe: Recipe
) -> tuple[AttentionBackend, KVCache, int]:
    """Prepare a transformers model: attention, cache and length limit, and linear layers of the recipe."""
    from cospec.models import hf

    attention = _attention(recipe, shapes)
    cache, max_len = _cache(config, shapes, attention, recipe)
    small = BlockPool(4, cache.pages.page_size, prefix_caching=False)
    trial = KVCache(shapes, small, recipe.cache_dtype, recipe.device, attention.by_head)
    hf.check_packing(model, trial, attention)
    return attention, cache, max_len


def check_division(name: str, options: LoadOptions) -> int:
    """Check that a model divides into ``options.shard.stages`` by ``options.shard.ranks`` parts.

    Returns:
        The size of the model's vocabulary.

    Raises:
        ModelError, InvalidInput: as in ``load_stage``; no weights are loaded.
    """
    recipe = make_recipe(name, options)
    config, shard = model_config(recipe.name, recipe.folder), options.shard
    check_shards(config, shard.stages, shard.ranks)
    check_columns(recipe.source, config, shard.ranks, recipe.format, recipe.convert)
    return int(config.vocab_size)


def load_stage(name: str, options: LoadOptions, sum: SumShards | None = None) -> StageForward:
    """Load the part ``options.shard`` of a model, with a KV cache of ``options.num_pages`` for its layers.

    Args:
        sum: the sum over the shards of the stage; None for one shard.

    Raises:
        ModelError, InvalidInput: as in ``load_model``, also if the model does not divide so.
    """
    recipe, shard = make_recipe(name, options), options.shard
    whole = fix_frequencies(model_config(name, recipe.folder), options.max_model_len)
    check_shards(whole, shard.stages, shard.ranks)
    config = shard_config(whole, shard)
    reason = _why_not_fused(config, recipe)
    _log_forward(recipe, reason)
    if reason:
        return _hf_stage(recipe, sum)
    if recipe.device.type == "cpu":
        from cospec.native.llama_stage import NativeStage

        packed = _packed(config, recipe)
        shapes = _packed_shapes(packed)
        cache, max_len = _cache(config, shapes, _attention(recipe, shapes), recipe)
        return NativeStage(packed, cache, (whole.vocab_size, max_len), shard, sum)
    weights = load_llama_weights(recipe)
    shapes = _llama_shapes(weights)
    attention = _attention(recipe, shapes)
    cache, _ = _cache(config, shapes, attention, recipe)
    return PythonStage(TorchStage(weights, cache, attention, shard, sum), cache, shard)


def _hf_stage(recipe: Recipe, sum: SumShards | None) -> StageForward:
    """Load a part that runs in transformers' code."""
    from cospec.models import hf, hf_stage

    shard = recipe.options.shard
    with hf_logging_off():
        whole = fixed_hf_config(recipe)
        config = shard_config(whole, shard)
        recipe = recipe.of_part(whole, ModuleNames.of(config))
        model = load_hf_weights(config, recipe, recipe.state_dtype)
        if recipe.device.type == "cpu":
            replace_linears(model, recipe.linear, recipe.format, recipe.read)
        attention, cache, _ = _checked(model, hf.probe(model), config, recipe)
    return PythonStage(hf_stage.HFStage(model, whole, cache, attention, shard, sum), cache, shard)


def _fused_model(config: Any, recipe: Recipe) -> Model:
    """Build the hand-written forward.

    The forward stores its own weights, so the loaded model is freed before the cache is allocated.
    """

    if recipe.device.type == "cpu":
        packed = _packed(config, recipe)
        shapes = _packed_shapes(packed)
        attention = _attention(recipe, shapes)
        fused = FusedLlama.packed(packed)
    else:
        weights = load_llama_weights(recipe)
        shapes = _llama_shapes(weights)
        attention = _attention(recipe, shapes)
        fused = FusedLlama.build(weights, attention, in_place=False)
        del weights
        torch.cuda.empty_cache()
    cache, max_len = _cache(config, shapes, attention, recipe)
    forwards = fused.forwards(cache, max_len, recipe.options.keep_hidden_states)
    return ModelRunner(recipe.name, forwards, cache, fused.vocab_size, max_len)


def _packed_shapes(packed: PackedModel) -> list[LayerShape]:
    known = packed.facts["config"]
    return [LayerShape(known["kv_heads"], known["dim"])] * known["num_layers"]


def _llama_shapes(weights: LlamaWeights) -> list[LayerShape]:
    return [LayerShape(weights.kv_heads, weights.dim)] * len(weights.layers)


def _packed(config: Any, recipe: Recipe) -> PackedModel:
    """Return the packed weights of the native forward, from the cache if possible. Merged adapters are not cached."""
    cache = recipe.options.weight_cache if recipe.adapter is None else NO_CACHE
    files = [*weight_files(recipe.folder), *configurations(recipe.folder)]
    how: dict[str, Any] = {
        "format": type(recipe.format).__qualname__,
        "dtype": str(recipe.dtype),
        "convert": recipe.convert,
        "shard": asdict(recipe.options.shard),
    }
    how["rope"] = config.rope_parameters  # with the choice of a long-rope model
    layers = recipe.source.num_bytes(recipe.format, recipe.convert, OUTPUT_EMBEDDINGS)
    tables = recipe.source.num_bytes(recipe.format, recipe.convert) - layers
    parts = recipe.options.shard.stages * recipe.options.shard.ranks
    size = layers // parts + tables * (1 if HEAD in recipe.source.shapes else 2)  # a tied table has two layouts

    def pack_weights(to: ArrayMemory) -> dict[str, Any]:
        return llama_weight_packing.pack(load_llama_weights(recipe), to)

    return cache.packed(recipe.folder.name, files, how, size, pack_weights)


def _attention(recipe: Recipe, shapes: Sequence[LayerShape]) -> AttentionBackend:
    """Return the attention back end for layers of these shapes."""
    return choose_attention(recipe.options.attention_backend, recipe.device, shapes, recipe.options.page_size)


def _cache(config: Any, shapes: list[LayerShape], attention: AttentionBackend, recipe: Recipe) -> tuple[KVCache, int]:
    """Build the KV cache in the layout of the attention, and the length limit of a sequence."""
    length = length_of(config.get_text_config(), recipe.name, recipe.options.max_model_len)
    if length.cut:
        log.warning("a sequence of %s has at most %d tokens: %s", recipe.name, length.allowed, length.cut)
    pages, max_len = _pages(shapes, recipe.cache_dtype, length.allowed, recipe)
    return KVCache(shapes, pages, recipe.cache_dtype, recipe.device, attention.by_head), max_len


def _log_forward(recipe: Recipe, reason: str) -> None:
    """Log which weights become floats, and why a CPU runs transformers' layers; the first part of a model logs."""
    options, shard = recipe.options, recipe.options.shard
    if not shard.first or shard.rank:
        return
    if expansion := (recipe.in_layers if reason else recipe).expansion:
        log.warning("%s", expansion)
    if reason and recipe.device.type == "cpu":
        chosen = {options.fused, options.linear_backend, options.attention_backend} - {"auto", "native"}
        level = logging.INFO if chosen else logging.WARNING
        log.log(level, "%s runs in transformers' layers, because the model %s.", recipe.name, reason)


def _why_not_fused(config: Any, recipe: Recipe) -> str:
    """Return why the hand-written forward cannot run a model, as an ending of "because the model ..."; empty if it can.

    On a CPU the forward needs two native back ends.
    """
    if recipe.options.fused == "never":
        return "is loaded with fused 'never'"
    if reason := why_not(config):
        return reason
    if not _same_gates(recipe):
        return "has gate and up projections of different weight formats or orders of inputs"
    if recipe.device.type == "cuda":
        return "has experts" if has_experts(config) else ""
    native = _attention(recipe, ()).native_forward and recipe.linear == "native"
    return "" if native else "takes a back end that is not native"


def _same_gates(recipe: Recipe) -> bool:
    """Whether the two projections that enter a feed-forward have one format, and order of inputs, in every layer."""
    if recipe.convert:
        return True
    orders = recipe.source.orders
    gates = [name for name in recipe.source.shapes if name.endswith(".gate_proj.weight")]
    pairs = [(name, name.replace(".gate_proj.", ".up_proj.")) for name in gates]
    formats = {name: recipe.source.kept_format(name, recipe.format) for pair in pairs for name in pair}
    named = {name: None if format is None else format.name for name, format in formats.items()}
    return all(named[a] == named[b] and same_order(orders.get(a), orders.get(b)) for a, b in pairs)


def _pages(shapes: list[LayerShape], dtype: torch.dtype, limit: int, recipe: Recipe) -> tuple[BlockPool, int]:
    """Build the page pool, and return the length limit of a sequence."""
    options = recipe.options
    size = options.page_size
    if options.num_pages is not None:
        return BlockPool(options.num_pages, size, options.prefix_caching), min(limit, options.num_pages * size)
    budget = options.budget or divide(
        [MemoryNeed(0, 0)], recipe.device, options.gpu_memory_utilization, options.cache_bytes
    )  # the weights are in memory already
    room = KVRoom(limit, limit if options.max_model_len is not None else 2, options.max_num_seqs)
    count = pages_for(recipe.name, budget, shapes, dtype, size, room)
    return BlockPool(count, size, options.prefix_caching), min(limit, count * size)
