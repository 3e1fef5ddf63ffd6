"""The report of an engine at its start: model, parameters, kernels, drafter, KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cospec.config import EngineConfig, SpeculativeConfig
from cospec.models.files.weight_source_selection import open_source
from cospec.models.kv_cache_formats import dtype_name
from cospec.models.linear import choose_linear
from cospec.models.load_options import LoadOptions, Recipe, choose_device
from cospec.models.loading import planned_recipe
from cospec.models.lora import base_folder
from cospec.native import library
from cospec.plugin_options import LIKE_TARGET, ModelOptions
from cospec.registry import DRAFTERS

INSTALL_KERNELS = "install g++ or clang++ and install cospec again for the fast ones"


@dataclass(frozen=True, slots=True)
class StartReport:
    """The facts of an engine that has been built.

    Attributes:
        models: name and number of parameters of each model of the output distribution.
        formats: of the weights, with their shares of the bytes; several where models differ.
        kernels: the CPU kernels in use, or why native kernels are missing.
        drafting: the drafter and its policy.
        kv_cache_dtype: of keys and values; several names where models differ.
        kv_cache_tokens: capacity of the KV cache in tokens.
        max_model_len: tokens of the longest sequence.
    """

    models: tuple[tuple[str, int], ...]
    device: str
    formats: str
    kernels: str
    drafting: str
    kv_cache_dtype: str
    kv_cache_tokens: int
    max_model_len: int

    def lines(self) -> list[str]:
        """Return one line per fact."""
        models = ", ".join(f"{name} ({count(parameters)} parameters)" for name, parameters in self.models)
        return [
            f"model: {models}",
            f"device: {self.device}",
            f"weights: {self.formats}",
            f"kernels: {self.kernels}",
            f"speculation: {self.drafting}",
            f"KV cache: {self.kv_cache_tokens:,} tokens of {self.kv_cache_dtype}; "
            f"a sequence has at most {self.max_model_len:,}",
        ]


def summarize(config: EngineConfig, paths: Sequence[Path], drafting: str, tokens: tuple[int, int]) -> StartReport:
    """Build the summary of an engine for ``config``.

    Args:
        paths: folders of the models of the output distribution.
        tokens: capacity of the KV cache, and length of the longest sequence.
    """
    names = [member.model for member in config.models or ()] or [config.model]
    if len(names) < len(paths):
        names = [path.name for path in paths]
    recipes, device = _recipes(config, paths), choose_device(config.device)
    return StartReport(
        models=tuple((name, recipe.source.elements) for name, recipe in zip(names, recipes, strict=True)),
        device=str(device),
        formats=" and ".join(dict.fromkeys(recipe.formats for recipe in recipes)),
        kernels=kernels(config, device),
        drafting=drafting,
        kv_cache_dtype=", ".join(dict.fromkeys(dtype_name(recipe.cache_dtype) for recipe in recipes)),
        kv_cache_tokens=tokens[0],
        max_model_len=tokens[1],
    )


def _recipes(config: EngineConfig, paths: Sequence[Path]) -> list[Recipe]:
    """Return how each model of the output distribution was loaded."""
    names = ("device", "dtype", "quantization", "kv_cache_dtype", "linear_backend", "attention_backend")
    options = LoadOptions(**{name: getattr(config, name) for name in names})
    members: Sequence[ModelOptions] = config.models or [LIKE_TARGET] * len(paths)
    return [planned_recipe(str(path), options.of_model(own)) for path, own in zip(paths, members, strict=True)]


def parameters(folder: Path) -> int:
    """Return the number of weights of the model in ``folder``; an adapter has the size of its base."""
    return open_source(base_folder(folder)).elements


def of_threads(count: int) -> str:
    """Return a number of threads in words."""
    return "1 thread" if count == 1 else f"{count} threads"


def kernels(config: EngineConfig, device: torch.device) -> str:
    """Return the kernels on ``device``, or why the native kernels are missing."""
    if device.type != "cpu":
        return f"torch's, for {device.type}"
    back_end = choose_linear(config.linear_backend, device)
    if back_end == "native":
        return f"native, {library.isa()}, {of_threads(library.threads())}"
    by_torch = "oneDNN's, through torch" if back_end == "mkldnn" else "torch's"
    if not library.available():
        return f"{by_torch}, because {library.why_not()}; {INSTALL_KERNELS}"
    return f"{by_torch}, as configured"


def drafting(speculative: SpeculativeConfig, model: str | None) -> str:
    """Describe the drafter and its policy.

    Args:
        model: the drafter's model, if the family has a drafter.
    """
    if not speculative.drafts:
        return "off"
    given = speculative.options.get("model", model if DRAFTERS.load(speculative.method).has_kv_cache else None)
    weights = speculative.options.get("quantization") or speculative.options.get("dtype")
    named = (f" {given}" if given else "") + (f" with {weights} weights" if weights else "")
    length = speculative.num_speculative_tokens
    far = "" if length == "auto" else f", {length} tokens" if speculative.policy_name == "fixed" else f" up to {length}"
    return f"{speculative.method}{named}, policy {speculative.policy_name}{far}"


def count(number: int) -> str:
    """Return a number of parameters in words: 22.4 M, 1.24 B."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
