"""Turns a model's name into a running model: options, weights, cache, back ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from cospec.core.interfaces import Model
from cospec.errors import InvalidInput, ModelError
from cospec.models.attention.backend import AttentionBackend, choose_attention
from cospec.models.block_manager import BlockPool
from cospec.models.checkpoint import check_stored, read_config, resolve, weight_files
from cospec.models.files.open_source import open_source
from cospec.models.files.source import EMBEDDING, WeightSource
from cospec.models.hf_logging import hf_logging_off, weights_progress
from cospec.models.hf_weights import first_line, hf_config, hf_model
from cospec.models.kv_cache import KVCache, LayerShape
from cospec.models.linear import choose_linear, replace_linears
from cospec.models.llama import FusedLlama, read_weights, why_not
from cospec.models.lora import AdapterFolder, base_folder, is_adapter, merge, read_adapter
from cospec.models.memory import (
    CacheBudget,
    KVRoom,
    MemoryNeed,
    MemoryPlan,
    PlannedWeights,
    divide,
    need_of,
    pages_for,
)
from cospec.models.model_runner import ModelRunner, check_numbers
from cospec.models.weights.format import TORCH_DTYPES, ReadWeight, StoredWeight, WeightFormat, choose_format
from cospec.options import WeightOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LoadOptions", "cache_budget", "load_model", "load_tokenizer", "memory_plan", "resolve", "weights_dtype"]

log = logging.getLogger(__name__)


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
        keep_states: keep the hidden states of every forward in ``Model.states``.
    """

    device: str = "auto"
    dtype: str = "auto"
    linear_backend: str = "auto"
    attention_backend: str = "auto"
    quantization: str | None = None
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

    def of_model(self, weights: WeightOptions) -> LoadOptions:
        """Return these options with the own weights of a drafter or member, for its own longest sequence."""
        if not weights.given:
            return replace(self, max_model_len=None)
        return replace(self, max_model_len=None, dtype=weights.dtype or "auto", quantization=weights.quantization)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The options, made concrete for one folder and one machine; ``adapter`` is merged into ``folder``'s weights.

    Attributes:
        fused: whether the hand-written forward reads the files, whose tensors have transformers' names.
    """

    name: str
    folder: Path
    adapter: AdapterFolder | None
    device: torch.device
    dtype: torch.dtype
    format: WeightFormat
    linear: str
    source: WeightSource
    options: LoadOptions
    fused: bool = False

    @property
    def convert(self) -> bool:
        """Whether weights in blocks get another format."""
        return self.options.quantization is not None or self.device.type != "cpu"

    @property
    def read(self) -> ReadWeight | None:
        """How linear weights are read from the source; None reads the weights of the loaded modules."""
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

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else self.dtype


def load_model(name: str, options: LoadOptions = LoadOptions()) -> Model:
    """Load the model ``name``, see ``resolve``; a LoRA adapter is merged into its base.

    Raises:
        ModelError: the model is not found, unreadable, unsupported, or gives NaN logits.
        InvalidInput: an option does not fit the model or the machine.
    """
    recipe = _recipe(name, options)
    size = sum(file.stat().st_size for file in weight_files(recipe.folder))
    with hf_logging_off(), weights_progress(recipe.name, size):
        model = _assemble(recipe)
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
    with hf_logging_off():
        needs = [_need(_recipe(name, own)) for name, own in models]
    return divide(needs, _device(options.device), options.gpu_memory_utilization, options.cache_bytes)


def memory_plan(models: Sequence[tuple[str, LoadOptions]]) -> MemoryPlan:
    """Plan the memory of models.

    Args:
        models: name and options of each; the first is the target.

    Raises:
        ModelError, InvalidInput: as in ``load_model``, also if memory does not suffice.
    """
    _, options = models[0]
    with hf_logging_off():
        recipes = [_recipe(name, own) for name, own in models]
        needs = [_need(recipe) for recipe in recipes]
        target, config = recipes[0], hf_config(recipes[0].name, recipes[0].folder)
        length = _limit(config.get_text_config(), target)
    token = sum(need.token for need in needs)
    budget = divide(needs, target.device, options.gpu_memory_utilization, options.cache_bytes)
    room = KVRoom(length.allowed, length.allowed if options.max_model_len is not None else 2, options.max_num_seqs)
    pages = pages_for(target.name, replace(budget, token=token), (), target.cache_dtype, options.page_size, room)
    return MemoryPlan(
        weights=tuple(
            PlannedWeights(recipe.name, recipe.format.name, need.weights)
            for recipe, need in zip(recipes, needs, strict=True)
        ),
        token_bytes=token,
        kv_cache_tokens=pages * options.page_size,
        max_model_len=min(length.allowed, pages * options.page_size),
        cut=length.cut,
        slow="" if _takes_fused(config, target) else why_not(config) or "a back end is not native",
    )


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


def _recipe(name: str, options: LoadOptions) -> _Recipe:
    found = resolve(name)
    folder = base_folder(found)
    raw = read_config(folder)
    check_stored(name, raw)
    source = open_source(folder)
    device = _device(options.device)
    dtype = source.dtype if options.dtype == "auto" else weights_dtype(found, options.dtype)
    return _Recipe(
        name=name,
        folder=folder,
        adapter=read_adapter(found) if is_adapter(found) else None,
        device=device,
        dtype=dtype,
        format=choose_format(options.quantization, dtype, device),
        linear=choose_linear(options.linear_backend, device),
        source=source,
        options=options,
    )


def _need(recipe: _Recipe) -> MemoryNeed:
    weights = recipe.source.num_bytes(recipe.format, recipe.convert)
    return need_of(hf_config(recipe.name, recipe.folder).get_text_config(), weights, recipe.cache_dtype)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder; an adapter without a tokenizer has its base's.

    Raises:
        ModelError: no tokenizer exists, or its reading would run code of the folder.
    """
    from transformers import AutoTokenizer

    folder = folder if (folder / "tokenizer_config.json").exists() else base_folder(folder)
    with hf_logging_off():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            # Many libraries read tokenizers and may raise anything.
            raise ModelError(f"The folder {folder} has no tokenizer that can be read: {first_line(error)}.") from error
    return tokenizer


def _assemble(recipe: _Recipe) -> Model:
    from cospec.models import hf

    config = hf_config(recipe.name, recipe.folder)
    if _takes_fused(config, recipe):
        return _fused_model(config, replace(recipe, fused=EMBEDDING in recipe.source.shapes))
    model = _weights(config, recipe, recipe.cache_dtype)
    if recipe.device.type == "cpu":
        replace_linears(model, recipe.linear, recipe.format, recipe.read)
    shapes = hf.probe(model)
    attention = _attention(recipe, shapes)
    cache, max_len = _cache(config, shapes, attention, recipe)
    small = BlockPool(4, cache.pages.page_size, prefix_caching=False)
    trial = KVCache(shapes, small, recipe.cache_dtype, recipe.device, attention.by_head)
    hf.check_packing(model, trial, attention)
    return hf.packed_model(recipe.name, model, cache, attention, max_len, recipe.options.keep_states)


def _fused_model(config: Any, recipe: _Recipe) -> Model:
    """Build the hand-written forward.

    The forward stores its own weights, so the loaded model is freed before the cache is allocated.
    """

    table = recipe.table
    model = _weights(config, recipe, recipe.dtype, () if table is None else (EMBEDDING,))
    weights = read_weights(model, recipe.format, recipe.read, table)
    shapes = [LayerShape(weights.kv_heads, weights.dim)] * len(weights.layers)
    attention = _attention(recipe, shapes)
    fused = FusedLlama.build(weights, attention, in_place=recipe.device.type == "cpu")
    del model, weights
    if recipe.device.type == "cuda":
        torch.cuda.empty_cache()
    cache, max_len = _cache(config, shapes, attention, recipe)
    forwards = fused.forwards(cache, max_len, recipe.options.keep_states)
    return ModelRunner(recipe.name, forwards, cache, fused.vocab_size, max_len)


def _attention(recipe: _Recipe, shapes: Sequence[LayerShape]) -> AttentionBackend:
    """Return the attention back end for layers of these shapes."""
    return choose_attention(recipe.options.attention_backend, recipe.device, shapes, recipe.options.page_size)


def _cache(config: Any, shapes: list[LayerShape], attention: AttentionBackend, recipe: _Recipe) -> tuple[KVCache, int]:
    """Build the KV cache in the layout of the attention, and the length limit of a sequence."""
    length = _limit(config.get_text_config(), recipe)
    if length.cut:
        log.warning("a sequence of %s has at most %d tokens: %s", recipe.name, length.allowed, length.cut)
    pages, max_len = _pages(shapes, recipe.cache_dtype, length.allowed, recipe)
    return KVCache(shapes, pages, recipe.cache_dtype, recipe.device, attention.by_head), max_len


def _takes_fused(config: Any, recipe: _Recipe) -> bool:
    """Whether the hand-written forward can run the model: on a CPU only if both back ends are native."""
    if recipe.options.fused == "never" or why_not(config) or not _same_gates(recipe):
        return False
    return recipe.device.type == "cuda" or (_attention(recipe, ()).native_forward and recipe.linear == "native")


def _same_gates(recipe: _Recipe) -> bool:
    """Whether the two projections that enter a feed-forward have one format in every layer."""
    kinds = {} if recipe.convert else recipe.source.kinds
    gates = [name for name in recipe.source.shapes if name.endswith(".gate_proj.weight")]
    return all(kinds.get(name) == kinds.get(name.replace(".gate_proj.", ".up_proj.")) for name in gates)


def _weights(config: Any, recipe: _Recipe, dtype: torch.dtype, without: Sequence[str] = ()) -> Any:
    """Load the Hugging Face model as ``dtype``; weights are rounded first if ``dtype`` has fewer bits than the file."""
    from cospec.models import hf

    if getattr(config, "is_encoder_decoder", False):
        raise hf.refusal(config, "is an encoder-decoder")
    merged = recipe.adapter is not None and recipe.device.type == "cpu"  # in float32, rounded once
    try:
        loaded = torch.float32 if merged else dtype
        tensors = recipe.source.state_dict(loaded, without) if recipe.direct else None
        options = {"attn_implementation": hf.ATTENTION_NAME, "tensors": tensors}
        model, report = hf_model(recipe.folder, config, loaded, **options)
    except Exception as error:
        # Constructors of some architectures look the attention up in their own tables and may raise anything.
        if hf.ATTENTION_NAME in str(error):
            raise hf.refusal(config, "does not take another attention function") from error
        raise ModelError(f"The model {recipe.name} cannot be loaded: {first_line(error)}.") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"The weights of {recipe.name} lack {len(missing)} tensors of its architecture: {missing[0]}.")
    if recipe.adapter is not None:
        merge(model, recipe.adapter)
    if recipe.dtype is not torch.float32 and model.dtype is torch.float32 and not recipe.direct:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(recipe.dtype).float()
    return model.to(recipe.device).eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class _Length:
    """The length limit of a sequence in tokens, and why the limit is below the configuration's."""

    allowed: int
    cut: str = ""


def _limit(config: Any, recipe: _Recipe) -> _Length:
    """Return the length limit of a sequence: the model's positions, or the user's limit."""
    limit: Any = getattr(config, "max_position_embeddings", None)
    kept, cut = limit, ""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):  # of the model, or of each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            # Beyond this length the whole batch would switch to other frequencies, for sequences of any length.
            kept = rope.get("original_max_position_embeddings") or limit
    if kept != limit:
        cut = f"its long-rope frequencies change for the whole batch beyond {kept} of its {limit} positions"
    requested = recipe.options.max_model_len
    if kept is None and requested is None:
        raise ModelError(f"The model {recipe.name} has no length limit in its configuration; set max_model_len.")
    if requested is not None and (requested < 2 or (kept is not None and requested > kept)):
        reason = f", since {cut}" if cut else ""
        raise InvalidInput("max_model_len", requested, f"2 to {kept}, the positions of {recipe.name}{reason}")
    return _Length(int(requested if requested is not None else kept), cut if requested is None else "")


def _pages(shapes: list[LayerShape], dtype: torch.dtype, limit: int, recipe: _Recipe) -> tuple[BlockPool, int]:
    """Build the page pool, and return the length limit of a sequence."""
    options = recipe.options
    size = options.page_size
    budget = options.budget or divide(
        [MemoryNeed(0, 0)], recipe.device, options.gpu_memory_utilization, options.cache_bytes
    )  # the weights are in memory already
    room = KVRoom(limit, limit if options.max_model_len is not None else 2, options.max_num_seqs)
    count = pages_for(recipe.name, budget, shapes, dtype, size, room)
    return BlockPool(count, size, options.prefix_caching), min(limit, count * size)


def _device(name: str) -> torch.device:
    usable = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    if name == "auto":
        return torch.device(usable[-1])
    if name not in usable:
        raise InvalidInput("device", name, f"auto or {' or '.join(usable)} on this machine")
    return torch.device(name)
