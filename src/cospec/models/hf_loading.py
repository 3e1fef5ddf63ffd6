"""Configuration, tokenizer and modules of a model in transformers' code, with weights from any source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cospec.errors import ModelError
from cospec.models.config_cache import PlainConfig, store_config, stored_config
from cospec.models.files.source import MULTIMODAL
from cospec.models.files.weight_source_selection import open_source
from cospec.models.hf_logging import hf_logging_off
from cospec.models.hf_tokenizer import tokenizer_of
from cospec.models.lora import base_folder
from cospec.models.model_folder import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


def hf_config(name: str, folder: Path) -> Any:
    """Return transformers' configuration of a model's folder; of a multimodal model that of its text model.

    Raises:
        ModelError: the type is unknown, or needs code of the folder.
    """
    from transformers import AutoConfig

    with hf_logging_off():
        try:
            config = AutoConfig.from_pretrained(folder, **LOCAL)
        except Exception as error:
            # Configurations of unknown types, or with their own code, end here with an error.
            raise ModelError(f"The configuration of {name} cannot be used: {first_line(error)}.") from error
    config = config.text_config if config.model_type in MULTIMODAL else config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the source of the weights unpacks them; transformers would do so again
    return config


def model_config(name: str, folder: Path) -> Any | PlainConfig:
    """Return the values of ``hf_config``, without an import of transformers if an earlier start stored the values."""
    found: Any | PlainConfig | None = stored_config(folder)
    if found is None:
        found = hf_config(name, folder)
        store_config(folder, found)
    return found


def hf_model(folder: Path, config: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a causal language model as ``dtype``, and transformers' report about the tensors.

    Args:
        options: of ``from_pretrained``, such as ``attn_implementation``; ``tensors`` replaces the folder's files.

    Raises:
        Exception: of transformers' code.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    options |= {"config": config, "dtype": dtype, "output_loading_info": True}
    tensors = options.pop("tensors", None)
    if tensors is None and (source := open_source(folder)).packed:
        tensors = {name: source.read(name).to(dtype) for name in source.shapes}
    found: Any
    if tensors is not None:
        of_type: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        found = of_type.from_pretrained(None, state_dict=tensors, **options)
    else:
        found = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **LOCAL, **options)
    model, report = found
    return model, report


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder; an adapter without a tokenizer has its base's.

    Raises:
        ModelError: no tokenizer exists, or its reading would run code of the folder.
    """
    folder = folder if (folder / "tokenizer_config.json").exists() else base_folder(folder)
    with hf_logging_off():
        try:
            tokenizer: PreTrainedTokenizerBase = tokenizer_of(folder, **LOCAL)
        except Exception as error:
            # Many libraries read tokenizers and may raise anything.
            raise ModelError(f"The folder {folder} has no tokenizer that can be read: {first_line(error)}.") from error
    return tokenizer


def eos_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return every id that ends an output: of generation_config.json, of config.json, of the tokenizer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.exists():
            value = read_object(file).get("eos_token_id")
            found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without a full stop."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(". ")
