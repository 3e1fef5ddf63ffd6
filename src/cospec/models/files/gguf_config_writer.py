"""Writes a configuration in transformers' words as the metadata of a GGUF file: the inverse of ``gguf_config``.

A file has no place for some values, such as the pattern of Gemma's sliding windows, which is code in llama.cpp. So the
written metadata are read back, and a model is refused whose values come back changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isclose, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import RopeScalingType
from numpy.typing import NDArray

from cospec.errors import ModelError
from cospec.models.files.gguf_config import ARCHITECTURES, LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, read_config
from cospec.models.files.gguf_file import GgufFile
from cospec.models.hf_loading import hf_config
from cospec.models.hf_logging import hf_logging_off

Config = Mapping[str, Any]
WRITABLE = {known.model_type: name for name, known in ARCHITECTURES.items()} | {"mistral": "llama"}
"""Architectures of the file by ``model_type``."""
_OLMO_EPS = 1e-5  # which transformers' layer norm of OLMo has in its code
_OWN: dict[str, dict[str, Callable[[GGUFWriter, Any], None]]] = {
    "gemma2": {
        "attn_logit_softcapping": GGUFWriter.add_attn_logit_softcapping,
        "final_logit_softcapping": GGUFWriter.add_final_logit_softcapping,
        "sliding_window": GGUFWriter.add_sliding_window,
    },
    "gemma3": {
        "final_logit_softcapping": GGUFWriter.add_final_logit_softcapping,
        "sliding_window": GGUFWriter.add_sliding_window,
    },
    "granite": {
        "attention_multiplier": GGUFWriter.add_attention_scale,
        "embedding_multiplier": GGUFWriter.add_embedding_scale,
        "logits_scaling": GGUFWriter.add_logit_scale,
        "residual_multiplier": GGUFWriter.add_residual_scale,
    },
    "olmo": {"clip_qkv": GGUFWriter.add_clamp_kqv},
    "phi3": {"original_max_position_embeddings": GGUFWriter.add_rope_scaling_orig_ctx_len},
    "qwen3moe": {
        "moe_intermediate_size": GGUFWriter.add_expert_feed_forward_length,
        "num_experts_per_tok": GGUFWriter.add_expert_used_count,
        "num_local_experts": GGUFWriter.add_expert_count,
    },
}
"""What only one architecture writes, by transformers' names. A value of None is left out."""
# Values that change no output of the model, or that other compared values repeat.
_NOT_COMPARED = {
    "_name_or_path", "_sliding_window_pattern", "architectures", "attention_dropout", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "max_window_layers", "model_type", "no_rope_layer_interval", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop",
    "return_dict", "rope_parameters", "router_aux_loss_coef", "transformers_version", "use_cache", "use_sliding_window",
}  # fmt: skip


def text_config(folder: Path) -> Config:
    """Return the complete configuration of the text model in ``folder``.

    Raises:
        ModelError: the type of the model is unknown.
    """
    found: Config = hf_config(str(folder), folder).to_dict()
    return found


def write_config(writer: GGUFWriter, config: Config) -> None:
    """Write the metadata of an architecture."""
    heads, dim, rope = config["num_attention_heads"], _head_dim(config), _rope(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(int(dim * rope["partial_rotary_factor"]))
    writer.add_rope_freq_base(rope["rope_theta"])
    if writer.arch == "olmo":
        writer.add_layer_norm_eps(_OLMO_EPS)
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, add in _OWN.get(writer.arch, {}).items():
        if config[name] is not None:
            add(writer, config[name])
    if writer.arch == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)  # without the key llama.cpp may take a window
    if "sliding_attention" in config["rope_parameters"]:
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    _write_scaling(writer, rope, config)


def _write_scaling(writer: GGUFWriter, rope: Config, config: Config) -> None:
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope" and ROPE_FACTORS not in rope_factors(config):
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if rope["rope_type"] in ("longrope", "yarn") and writer.arch != "phi3":  # Phi 3 writes the length in any case
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _head_dim(config: Config) -> int:
    """Return how many numbers a head has."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_factors(config: Config) -> dict[str, NDArray[np.float32]]:
    """Return the divisors of rotary frequencies, by the names of their tensors."""
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        return {ROPE_FACTORS: _llama3_factors(rope, _head_dim(config))}
    if rope["rope_type"] != "longrope":
        return {}
    long, short = (np.asarray(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short"))
    if np.array_equal(long, short) and rope["attention_factor"] == 1:
        return {ROPE_FACTORS: long}
    return {LONG_FACTORS: long, SHORT_FACTORS: short}


def _llama3_factors(rope: Config, dim: int) -> NDArray[np.float32]:
    """Return the factors of Llama 3: long waves are divided by ``factor``, short waves by 1, others by a mean."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    short = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - short) / rope["factor"] + short), np.float32)


def _rope(config: Config) -> dict[str, Any]:
    """Return the parameters of rotary embeddings, of Gemma 3 those of full attention."""
    rope, longest = config["rope_parameters"], config["max_position_embeddings"]
    found = {"partial_rotary_factor": 1.0} | _given(rope.get("full_attention", rope))
    if found["rope_type"] in ("longrope", "yarn"):
        found = {"original_max_position_embeddings": longest} | found
    if found["rope_type"] == "longrope":
        length = found["original_max_position_embeddings"]
        factor = found.pop("factor", longest / length)
        implied = sqrt(1 + log(factor) / log(length)) if factor > 1 else 1.0
        found = {"attention_factor": implied} | found
    return found


def _given(rope: Config) -> dict[str, Any]:
    """Return the parameters that are given; ``type`` is an older name of ``rope_type``."""
    return {name: value for name, value in rope.items() if value is not None and name != "type"}


def check_config(file: GgufFile, folder: Path, config: Config) -> None:
    """Compare the metadata of ``file``, as they are read, with ``config``.

    Raises:
        ModelError: a value of the configuration that changes outputs comes back changed.
    """
    from transformers import AutoConfig

    with hf_logging_off():
        known = AutoConfig.for_model(config["model_type"]).to_dict().keys()  # files of models may have more
        held = AutoConfig.for_model(**read_config(file)).to_dict()
    pairs = {name: (config[name], held.get(name)) for name in sorted(known - _NOT_COMPARED)}
    if _rope(config)["rope_type"] != "llama3":  # which is read as factors
        pairs |= _rotary_pairs("rope_parameters", _rope(config), _rope(held))
        sliding = [_given(each["rope_parameters"].get("sliding_attention", {})) for each in (config, held)]
        pairs |= _rotary_pairs("rope_parameters.sliding_attention", *sliding)
    for name, (given, found) in pairs.items():
        if not _same(given, found):
            raise ModelError(
                f"The model {folder} has {name} {given}, which GGUF files of {file.architecture} cannot hold; "
                f"allowed is {found}."
            )


def _rotary_pairs(name: str, given: Config, held: Config) -> dict[str, tuple[Any, Any]]:
    return {f"{name}.{key}": (given.get(key), held.get(key)) for key in sorted(given.keys() | held.keys())}


def _same(given: Any, found: Any) -> bool:
    """Whether values are equal; numbers up to float32's rounding."""
    if isinstance(given, list) and isinstance(found, list):
        return len(given) == len(found) and all(map(_same, given, found))
    if isinstance(given, int | float) and isinstance(found, int | float):
        return isclose(given, found, rel_tol=1e-6)
    return bool(given == found)
