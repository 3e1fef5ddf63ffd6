"""From a model's name to a model that runs: its options, its weights, its cache, its back ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from cospec.core.interfaces import Model
from cospec.errors import InvalidInput, ModelError
from cospec.models.attention.backends import choose_attention
from cospec.models.block_manager import BlockPool
from cospec.models.checkpoint import check_stored, read_config, resolve, stored, weight_files
from cospec.models.hf_logging import hf_logging_off
from cospec.models.kv_cache import KVCache, LayerShape
from cospec.models.linear import choose_linear, replace_linears
from cospec.models.llama import FusedLlama, read_weights, why_not
from cospec.models.lora import AdapterFolder, base_folder, is_adapter, merge, read_adapter
from cospec.models.memory import (
    CacheBudget,
    KVRoom,
    MemoryNeed,
    MemoryPlan,
    divide,
    need_of,
    pages_for,
)
from cospec.models.model_runner import ModelRunner
from cospec.models.progress import weights_progress
from cospec.models.smoke_check import check_numbers
from cospec.native.operators import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LoadOptions", "cache_budget", "load_model", "load_tokenizer", "memory_plan", "resolve", "weights_dtype"]

log = logging.getLogger(__name__)

_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model; the names are those of ``EngineConfig``.

    Attributes:
        dtype: of the weights in memory; ``auto`` keeps the file's. On a CPU sums and states are float32 whatever it
            is; with ``bfloat16`` what products read is rounded to it.
        max_model_len: tokens of one sequence; None is the model's limit, or what the cache holds when that is less.
        cache_bytes: of the KV cache, or of those of all models together; None takes a share of the free memory.
        budget: what several models share, see ``cache_budget``; None for a model that is alone.
        max_num_seqs: sequences at once, which bounds a cache that is sized by itself.
        fused: ``auto`` runs Llama-family models by the hand-written forward where it can; ``never`` by transformers.
        instruction_set: of the CPU kernels of the process that loads the model.
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


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The options, made concrete for one folder and one machine; ``adapter`` is merged into what ``folder`` holds."""

    name: str
    folder: Path
    adapter: AdapterFolder | None
    device: torch.device
    dtype: torch.dtype
    kind: Kind
    linear: str
    elements: int
    options: LoadOptions

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else self.dtype


def load_model(name: str, options: LoadOptions = LoadOptions()) -> Model:
    """Load the model called ``name``, see ``resolve``; a LoRA adapter is merged into its base.

    Raises:
        ModelError: it cannot be found, read, or run as a packed batch, or its logits are not numbers.
        InvalidInput: an option does not fit the model or the machine.
    """
    recipe = _recipe(name, options)
    size = sum(file.stat().st_size for file in weight_files(recipe.folder))
    with hf_logging_off(), weights_progress(recipe.name, size):
        model = _assemble(recipe)
    check_numbers(model, recipe.name)
    return model


def cache_budget(names: Sequence[str], options: LoadOptions) -> CacheBudget:
    """What the KV caches of the models called ``names`` share, found before the first of them is loaded.

    Raises:
        ModelError, InvalidInput: as ``load_model`` does.
    """
    with hf_logging_off():
        needs = [_need(_recipe(name, options)) for name in names]
    return divide(needs, _device(options.device), options.gpu_memory_utilization, options.cache_bytes)


def memory_plan(names: Sequence[str], options: LoadOptions) -> MemoryPlan:
    """What the models called ``names`` will take together; the first of them is the target.

    Raises:
        ModelError, InvalidInput: as ``load_model`` does, also where memory does not suffice.
    """
    with hf_logging_off():
        recipes = [_recipe(name, options) for name in names]
        needs = [_need(recipe) for recipe in recipes]
        target, config = recipes[0], _config(recipes[0])
        length = _limit(config.get_text_config(), target)
    token = sum(need.token for need in needs)
    budget = divide(needs, target.device, options.gpu_memory_utilization, options.cache_bytes)
    room = KVRoom(length.allowed, length.allowed if options.max_model_len is not None else 2, options.max_num_seqs)
    pages = pages_for(target.name, replace(budget, token=token), (), target.cache_dtype, options.page_size, room)
    return MemoryPlan(
        weights={recipe.name: need.weights for recipe, need in zip(recipes, needs, strict=True)},
        token_bytes=token,
        kv_cache_tokens=pages * options.page_size,
        max_model_len=min(length.allowed, pages * options.page_size),
        cut=length.cut,
        slow="" if _takes_fused(config, target) else why_not(config) or "a back end is not native",
    )


def weights_dtype(found: Path, dtype: str = "auto") -> torch.dtype:
    """What the weights of the model in folder ``found`` are held as when it is loaded with ``dtype``.

    Raises:
        InvalidInput: there is no such dtype.
    """
    held = stored(weight_files(base_folder(found))).dtype if dtype == "auto" else _dtype_code(dtype)
    return _DTYPES[held]


def _recipe(name: str, options: LoadOptions) -> _Recipe:
    found = resolve(name)
    folder = base_folder(found)
    raw = read_config(folder)
    check_stored(name, folder, raw)
    held = stored(weight_files(folder))
    device = _device(options.device)
    dtype = weights_dtype(found, options.dtype)
    if options.quantization not in (None, "int8") or (options.quantization and device.type != "cpu"):
        raise InvalidInput("quantization", options.quantization, "int8 on a CPU, or None")
    kind: Kind = "int8" if options.quantization else "bf16" if dtype is torch.bfloat16 else "fp32"
    return _Recipe(
        name=name,
        folder=folder,
        adapter=read_adapter(found) if is_adapter(found) else None,
        device=device,
        dtype=dtype,
        kind=kind,
        linear=choose_linear(options.linear_backend, device),
        elements=held.elements,
        options=options,
    )


def _need(recipe: _Recipe) -> MemoryNeed:
    size = recipe.dtype.itemsize if recipe.device.type == "cuda" else {"int8": 1, "bf16": 2, "fp32": 4}[recipe.kind]
    return need_of(_config(recipe).get_text_config(), recipe.elements * size, recipe.cache_dtype)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder; an adapter without one has its base's.

    Raises:
        ModelError: there is none, or it cannot be read without running its code.
    """
    from transformers import AutoTokenizer

    folder = folder if (folder / "tokenizer_config.json").exists() else base_folder(folder)
    with hf_logging_off():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            # Tokenizers of many kinds are read by code that raises whatever it likes.
            raise ModelError(f"The folder {folder} has no tokenizer that can be read: {_first_line(error)}.") from error
    return tokenizer


def _assemble(recipe: _Recipe) -> Model:
    from cospec.models import hf

    config = _config(recipe)
    if _takes_fused(config, recipe):
        return _fused_model(config, recipe)
    model = _weights(config, recipe, recipe.cache_dtype)
    shapes = hf.probe(model)
    cache, attention, max_len = _cache(config, shapes, recipe)
    if recipe.device.type == "cpu":
        replace_linears(model, recipe.linear, recipe.kind)
    small = BlockPool(4, cache.pages.page_size, prefix_caching=False)
    by_head = attention == "sdpa"
    hf.check_packing(model, KVCache(shapes, small, recipe.cache_dtype, recipe.device, by_head), attention)
    return hf.packed_model(recipe.name, model, cache, attention, max_len, recipe.options.keep_states)


def _fused_model(config: Any, recipe: _Recipe) -> Model:
    """The hand-written forward. It holds the weights in its own way; the loaded ones go before the cache comes."""
    from cospec.models import hf

    model = _weights(config, recipe, recipe.dtype)
    shapes = hf.probe(model)
    fused = FusedLlama.build(read_weights(model), recipe.kind, in_place=recipe.device.type == "cpu")
    del model
    if recipe.device.type == "cuda":
        torch.cuda.empty_cache()
    cache, _, max_len = _cache(config, shapes, recipe)
    forwards = fused.forwards(cache, max_len, recipe.options.keep_states)
    return ModelRunner(recipe.name, forwards, cache, fused.vocab_size, max_len)


def _cache(config: Any, shapes: list[LayerShape], recipe: _Recipe) -> tuple[KVCache, str, int]:
    """The KV cache, the attention that reads it, and how long a sequence can be in it."""
    options = recipe.options
    attention = choose_attention(options.attention_backend, recipe.device, shapes, options.page_size)
    length = _limit(config.get_text_config(), recipe)
    if length.cut:
        log.warning("a sequence of %s has at most %d tokens: %s", recipe.name, length.allowed, length.cut)
    pages, max_len = _pages(shapes, recipe.cache_dtype, length.allowed, recipe)
    cache = KVCache(shapes, pages, recipe.cache_dtype, recipe.device, by_head=attention == "sdpa")
    return cache, attention, max_len


def _takes_fused(config: Any, recipe: _Recipe) -> bool:
    """Whether the hand-written forward serves: on a CPU only where both back ends are native."""
    options = recipe.options
    if options.fused == "never" or why_not(config):
        return False
    if recipe.device.type == "cuda":
        return True
    attention = choose_attention(options.attention_backend, recipe.device, (), options.page_size)
    return recipe.linear == attention == "native"


def _config(recipe: _Recipe) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(recipe.folder, **_LOCAL)
    except Exception as error:
        # Configurations of unknown kinds, or with code of their own, end here; the message says which.
        raise ModelError(f"The configuration of {recipe.name} cannot be used: {_first_line(error)}.") from error


def _weights(config: Any, recipe: _Recipe, dtype: torch.dtype) -> Any:
    """The Hugging Face model, held as ``dtype``; rounded first when fewer bits are asked for than the file has."""
    from transformers import AutoModelForCausalLM

    from cospec.models import hf

    if getattr(config, "is_encoder_decoder", False):
        raise hf.refusal(config, "is an encoder-decoder")
    merged = recipe.adapter is not None and recipe.device.type == "cpu"  # in float32, and rounded once
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            recipe.folder,
            config=config,
            dtype=torch.float32 if merged else dtype,
            attn_implementation=hf.ATTENTION_NAME,
            use_safetensors=True,
            output_loading_info=True,
            **_LOCAL,
        )
    except Exception as error:
        # Constructors of some architectures look the attention up in tables of their own and raise what they like.
        if hf.ATTENTION_NAME in str(error):
            raise hf.refusal(config, "does not take another attention function") from error
        raise ModelError(f"The model {recipe.name} cannot be loaded: {_first_line(error)}.") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"The weights of {recipe.name} lack {len(missing)} tensors of its architecture: {missing[0]}.")
    if recipe.adapter is not None:
        merge(model, recipe.adapter)
    if recipe.dtype is not torch.float32 and model.dtype is torch.float32:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(recipe.dtype).float()
    return model.to(recipe.device).eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class _Length:
    """Tokens of one sequence: how many are allowed, and why these are fewer than the configuration says."""

    allowed: int
    cut: str = ""


def _limit(config: Any, recipe: _Recipe) -> _Length:
    """Tokens of one sequence that the positions of the model allow, or that the user wants."""
    limit: Any = getattr(config, "max_position_embeddings", None)
    kept, cut = limit, ""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):  # of the model, or of each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            # Beyond this length the whole batch would switch to other frequencies, whatever its sequences' lengths.
            kept = rope.get("original_max_position_embeddings") or limit
    if kept != limit:
        cut = f"its long-rope frequencies change for the whole batch beyond {kept} of its {limit} positions"
    asked = recipe.options.max_model_len
    if kept is None and asked is None:
        raise ModelError(f"The model {recipe.name} does not say how long its sequences may be; set max_model_len.")
    if asked is not None and (asked < 2 or (kept is not None and asked > kept)):
        reason = f", since {cut}" if cut else ""
        raise InvalidInput("max_model_len", asked, f"2 to {kept}, the positions of {recipe.name}{reason}")
    return _Length(int(asked if asked is not None else kept), cut if asked is None else "")


def _pages(shapes: list[LayerShape], dtype: torch.dtype, limit: int, recipe: _Recipe) -> tuple[BlockPool, int]:
    """The page pool, and how long a sequence can be in it."""
    options = recipe.options
    size = options.page_size
    budget = options.budget or divide(
        [MemoryNeed(0, 0)], recipe.device, options.gpu_memory_utilization, options.cache_bytes
    )  # the weights are in their place already
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


def _dtype_code(name: str) -> str:
    codes = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    if name not in codes:
        raise InvalidInput("dtype", name, f"auto, {', '.join(codes)}")
    return codes[name]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(". ")
