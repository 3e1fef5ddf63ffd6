"""Writes transformers' models as GGUF files, as llama.cpp's converter does, with the package ``gguf``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from benchmarks.gguf_files import Model, add_shape, finish
from gguf.constants import GGMLQuantizationType, TokenType
from numpy.typing import NDArray

from harness.gguf_quantizers import quantize

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo": "olmo",
    "olmo2": "olmo2",
}
NO_KINDS: Mapping[str, str] = MappingProxyType({})
ROTATED = ("llama", "granite", "smollm3", "olmo")  # architectures whose queries and keys the converter rearranges


def write_model(
    path: Path, model: Any, kind: str = "F32", tokenizer: Any = None, kinds: Mapping[str, str] = NO_KINDS, **values: Any
) -> Path:
    """Write ``model`` with weights of the type ``kind``; vectors stay float32.

    Args:
        kinds: other types of tensors, by a part of their names in the file.
        values: metadata of the architecture, in addition to the common values.
    """
    config, architecture = model.config, ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, config, architecture, values)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(config.vocab_size)
    else:
        write_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for own, value in _converted(name, tensor.float().numpy(), config, architecture, names):
            chosen = next((other for part, other in kinds.items() if part in own), kind)
            as_kind = GGMLQuantizationType[chosen if value.ndim > 1 else "F32"]
            data = value if as_kind.name == "F32" else quantize(value, as_kind)
            writer.add_tensor(own, data, raw_dtype=as_kind)
    for name, value in _rope_factors(config).items():
        writer.add_tensor(name, np.asarray(value, np.float32))
    finish(writer)
    return path


def rewrite(source: Path, path: Path, changes: Mapping[str, Any], without: str = "") -> Path:
    """Write the file ``source`` with other metadata, and without the tensor ``without``; None removes a key."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", *changes):
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:2])
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in changes.items():
        integer: Any = writer.add_uint32 if isinstance(value, int) and value >= 0 else writer.add_int32
        if value is not None:
            adders.get(type(value), integer)(key, value)
    writer.data_alignment = 32  # also where the metadata say otherwise
    for tensor in reader.tensors:
        if tensor.name != without:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return path


def _write_config(writer: Any, config: Any, architecture: str, values: dict[str, Any]) -> None:
    shape = Model(
        name=config.model_type,
        architecture=architecture,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    add_shape(writer, shape, config.max_position_embeddings)
    if architecture == "olmo":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    theta = rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"]
    writer.add_rope_freq_base(theta)
    for key, value in values.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        (writer.add_string if isinstance(value, str) else add)(f"{architecture}.{key}", value)


def _converted(
    name: str, value: NDArray[np.float32], config: Any, architecture: str, names: Any
) -> list[tuple[str, NDArray[np.float32]]]:
    """Return tensors in llama.cpp's names and order for one tensor of transformers."""
    if architecture == "qwen3moe" and name.endswith("experts.gate_up_proj"):
        layer = name.split(".")[2]
        gate, up = np.split(value, 2, axis=1)
        return [(f"blk.{layer}.ffn_{part}_exps.weight", x) for part, x in (("gate", gate), ("up", up))]
    if architecture == "qwen3moe" and name.endswith("experts.down_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", value)]
    found: str = names.get_name(name, try_suffixes=(".weight", ".bias"))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(found.split(".")[-2])
    if heads and architecture in ROTATED:
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        value = halves.swapaxes(1, 2).reshape(value.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        value = value + 1
    return [(found, np.ascontiguousarray(value))]


def _rope_factors(config: Any) -> dict[str, Any]:
    """Return the factors of rotary frequencies: of Llama 3 as the quotient of plain and scaled frequencies."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        dim = config.head_dim
        plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        return {"rope_freqs.weight": (plain / scaled).numpy()}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": rope[f"{kind}_factor"] for kind in ("long", "short")}
    return {}


def write_tokenizer(writer: Any, tokenizer: Any, merges: int | None = None) -> None:
    """Write a byte-level tokenizer of transformers; ``merges`` keeps only the first merges."""
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"][:merges]]
    )
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
