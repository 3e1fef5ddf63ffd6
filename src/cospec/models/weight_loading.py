"""Loads the weights of a recipe: in transformers' modules, or for the hand-written forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cospec.errors import ModelError
from cospec.models.families import is_bidirectional, tensor_shapes
from cospec.models.files.source import EMBEDDING, HEAD
from cospec.models.hf_loading import first_line, hf_config, hf_model, model_config
from cospec.models.hf_logging import hf_logging_off
from cospec.models.llama_weights import LlamaWeights, read_weights, tensors_of
from cospec.models.load_options import Recipe
from cospec.models.long_rope import fix_frequencies
from cospec.models.lora import merge
from cospec.models.shard import shard_config

_SENSELESS = (AttributeError, TypeError, LookupError, ArithmeticError)
"""Errors of values of a configuration that are missing, or make no sense."""


def fixed_hf_config(recipe: Recipe) -> Any:
    """Return transformers' configuration of the whole model, with the frequencies of its longest sequence."""
    return fix_frequencies(hf_config(recipe.name, recipe.folder), recipe.options.max_model_len)


def load_hf_weights(config: Any, recipe: Recipe, dtype: torch.dtype, without: Sequence[str] = ()) -> Any:
    """Load a model in transformers' modules as ``dtype``.

    Weights are rounded first if the recipe's dtype has fewer bits than the file.

    Args:
        config: transformers' configuration of the model, or of a part.
        without: names of tensors that are read elsewhere.

    Raises:
        ModelError: the files do not fit the architecture, or the architecture does not fit cospec.
    """
    from cospec.models import hf

    if getattr(config, "is_encoder_decoder", False):
        raise hf.refusal(config, "is an encoder-decoder")
    if is_bidirectional(config):
        raise hf.refusal(config, "has bidirectional attention")
    merged = recipe.adapter is not None and recipe.device.type == "cpu"  # in float32, rounded once
    try:
        loaded = torch.float32 if merged else dtype
        tensors = recipe.source.state_dict(loaded, without) if recipe.direct else None
        if tensors is None and not recipe.options.shard.whole:
            tensors = {name: recipe.source.read(name).to(loaded) for name in recipe.source.shapes}
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
        merge(model, recipe.adapter, recipe.part)
    if recipe.dtype is not torch.float32 and model.dtype is torch.float32 and not recipe.direct:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(recipe.dtype).float()
    return model.to(recipe.device).eval().requires_grad_(False)


def load_llama_weights(recipe: Recipe) -> LlamaWeights:
    """Read the weights of the hand-written forward, of the recipe's part of the model.

    Raises:
        ModelError: as in ``load_hf_weights``.
    """
    try:
        return _read_llama_weights(recipe)
    except _SENSELESS as error:
        raise ModelError(f"The model {recipe.name} cannot be loaded: {first_line(error)}.") from error


def _read_llama_weights(recipe: Recipe) -> LlamaWeights:
    shard = recipe.options.shard
    whole = fix_frequencies(model_config(recipe.name, recipe.folder), recipe.options.max_model_len)
    recipe, config = recipe.of_part(whole), shard_config(whole, shard)
    recipe = replace(recipe, fused=EMBEDDING in recipe.source.shapes)
    table = recipe.table if shard.first else None
    elsewhere = [] if shard.first and table is None else [EMBEDDING]
    without = elsewhere + (recipe.source.experts if recipe.direct else [])
    expected = tensor_shapes(config)
    if HEAD in recipe.source.shapes:  # files of tied models may have an output layer of its own too
        expected[HEAD] = expected[EMBEDDING]
    if recipe.direct and expected.items() <= recipe.source.shapes.items():
        stored = recipe.source.state_dict(recipe.dtype, without)
        tensors = {name: stored[name] for name in expected}
    else:  # transformers renames and joins tensors, and says which are missing
        with hf_logging_off():
            model = load_hf_weights(shard_config(fixed_hf_config(recipe), shard), recipe, recipe.dtype, without)
        config, tensors = model.config, tensors_of(model)
    return read_weights(config, tensors, recipe.format, recipe.read, table, shard)
