"""Writes a model of the Llama family as a GGUF file, which llama.cpp and ``gguf_source`` read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, LlamaFileType, TokenType
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cospec.errors import InvalidInput, ModelError
from cospec.models.files.gguf_as_folder import NO_TOKENIZER
from cospec.models.files.gguf_config import ARCHITECTURES, ROPE_FACTORS
from cospec.models.files.gguf_source import MODEL_NAMES, names_of_layers
from cospec.models.files.gguf_tokenizer import PRE_TOKENIZERS, pre_tokenizer
from cospec.models.files.source import EMBEDDING, HEAD, WeightSource, block_format
from cospec.models.weights.blocks import BlockFormat
from cospec.registry import WEIGHT_FORMATS

FLOATS = ("f32", "f16", "bf16")
WRITABLE = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Architectures of the file by ``model_type``."""
TABLES = "q8_0"  # of embedding and output layer, whose errors count most
_PROBES = ("It's  1234 naïve\n\n x\tDON'T  _a(b)", "don't 12345 ÀÉ 日本 \r\n  foo//bar")


def kinds() -> list[str]:
    """Return the types that a file can be written in."""
    blocks = [name for name in WEIGHT_FORMATS if name.startswith(("q", "iq", "mx"))]
    return [*FLOATS, *blocks]


def write_gguf(path: Path, folder: Path, source: WeightSource, kind: str) -> None:
    """Write the model in ``folder`` to ``path``. Linear weights get the type ``kind``, norms and biases float32.

    Rows that are no multiple of the blocks of ``kind`` become Q8_0, and float16 where Q8_0 does not fit either.

    Raises:
        InvalidInput: ``kind`` is unknown.
        ModelError: the model is of another family, or its tokenizer is of another kind.
    """
    if kind not in kinds():
        raise InvalidInput("type", kind, ", ".join(kinds()))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_type = config.get("model_type", "")
    if model_type not in WRITABLE:
        allowed = ", ".join(WRITABLE)
        raise ModelError(f"The model {folder} is of type {model_type}; GGUF files can be written of {allowed}.")
    if model_type == "mistral" and config.get("sliding_window"):
        window = config["sliding_window"]
        raise ModelError(f"The model {folder} has sliding_window {window}; allowed in a written file is null.")
    architecture = WRITABLE[model_type]
    rope = _rope(folder, config)
    writer = GGUFWriter(path, architecture)
    _write_values(writer, config, rope, kind)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor(ROPE_FACTORS, _factors(config, rope))
    if (folder / "tokenizer.json").exists():
        _write_tokenizer(writer, folder)
    else:
        writer.add_tokenizer_model(NO_TOKENIZER)  # llama.cpp needs the key
    for name, value in _tensors(source, config, architecture):
        type_ = "f32" if value.ndim == 1 else _kind_of(value, TABLES if name in _TABLE_NAMES else kind, kind)
        data = _encoded(value, type_)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[type_.upper()])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


_TABLE_NAMES = ("token_embd.weight", "output.weight")


def _kind_of(value: NDArray[np.float32], wanted: str, kind: str) -> str:
    """Return the type of a tensor: floats in float files, and blocks that divide the rows."""
    if kind in FLOATS:
        return kind
    fits = [name for name in (wanted, TABLES) if value.shape[1] % block_format(name).block_size == 0]
    return fits[0] if fits else "f16"


def _encoded(value: NDArray[np.float32], kind: str) -> NDArray[Any]:
    if kind == "f32":
        return value
    if kind == "f16":
        return value.astype(np.float16)
    if kind == "bf16":
        import torch

        return torch.from_numpy(value).bfloat16().view(torch.uint8).numpy()
    format: BlockFormat = block_format(kind)
    rows = format.quantize(np.ascontiguousarray(value).reshape(-1, format.block_size))
    return rows.reshape(len(value), -1)


def _rope(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of rotary embeddings with the key ``rope_type``.

    Raises:
        ModelError: a file cannot hold the scaling.
    """
    rope = {**(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] not in ("default", "llama3"):
        raise ModelError(
            f"The model {folder} scales rotary embeddings by {rope['rope_type']}; "
            "allowed in a written file are default and llama3."
        )
    return rope


def _theta(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    return float(rope.get("rope_theta") or config.get("rope_theta") or 1e4)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return what Llama 3 divides each rotary frequency by, as llama.cpp's converter does.

    Long waves are divided by ``factor``, short waves by 1, and those between by a mean.
    """
    dim = _head_dim(config)
    frequencies = _theta(config, rope) ** -(np.arange(0, dim, 2) / dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    short = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - short) / rope["factor"] + short), np.float32)


def _write_values(writer: GGUFWriter, config: Mapping[str, Any], rope: Mapping[str, Any], kind: str) -> None:
    heads, dim = config["num_attention_heads"], _head_dim(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(_theta(config, rope))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    file_type = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q4_k": "MOSTLY_Q4_K_S"}
    name = file_type.get(kind, f"MOSTLY_{kind.upper()}")
    if name in LlamaFileType.__members__:
        writer.add_file_type(LlamaFileType[name])


def _tensors(
    source: WeightSource, config: Mapping[str, Any], architecture: str
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield all tensors in llama.cpp's names and order of rows."""
    model = {own: name for name, own in MODEL_NAMES.items()}
    layer = {own: name for name, own in names_of_layers(architecture).items()}
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config.get("num_key_value_heads") or config["num_attention_heads"],
    }
    for name in source.shapes:
        if name == HEAD and config.get("tie_word_embeddings") and EMBEDDING in source.shapes:
            continue
        module, _, last = name.rpartition(".")
        value = np.ascontiguousarray(source.read(name).float().numpy())
        if module in model:
            yield f"{model[module]}.{last}", value
            continue
        _, _, number, own = module.split(".", 3)
        if own not in layer:
            raise ModelError(f"The weights have the tensor {name}, for which GGUF files have no name.")
        found = layer[own]
        if found in heads and ARCHITECTURES[architecture].rotated_pairs:
            halves = value.reshape(heads[found], 2, -1, *value.shape[1:])
            value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
        yield f"blk.{number}.{found}.{last}", value


def _write_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    """Write a byte-level tokenizer.

    Raises:
        ModelError: the tokenizer is of another kind.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ModelError(f"The tokenizer of {folder} is no byte-level BPE, the only kind that can be written.")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    names = {id: token for token, id in vocab.items()}
    tokens = [names.get(id, f"[PAD{id}]") for id in range(max(names) + 1)]
    added = tokenizer.get_added_tokens_decoder()
    kinds = [_token_kind(id, names, added) for id in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_of(tokenizer, folder, bool(model.get("ignore_merges"))))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        token = settings.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text in vocab:
            add(vocab[text])
    first = tokenizer.encode("a").ids
    writer.add_add_bos_token(bool(first) and names[first[0]] == settings.get("bos_token"))
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def _token_kind(id: int, names: Mapping[int, str], added: Mapping[int, Any]) -> int:
    if id in added:
        return TokenType.CONTROL if added[id].special else TokenType.USER_DEFINED
    return TokenType.NORMAL if id in names else TokenType.UNUSED


def _pre_of(tokenizer: Tokenizer, folder: Path, whole: bool) -> str:
    """Return the name of the pre-tokenizer that cuts texts as the given one."""
    for name, cut in PRE_TOKENIZERS.items():
        own = pre_tokenizer(cut)
        if cut.whole == whole and all(
            own.pre_tokenize_str(text) == tokenizer.pre_tokenizer.pre_tokenize_str(text) for text in _PROBES
        ):
            return name
    raise ModelError(f"The tokenizer of {folder} cuts texts as none of llama.cpp's known pre-tokenizers.")
