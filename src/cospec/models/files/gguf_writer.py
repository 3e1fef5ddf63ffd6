"""Writes a model as a GGUF file, which llama.cpp and ``gguf_source`` read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from numpy.typing import NDArray
from torch import Tensor

from cospec.errors import InvalidInput, ModelError
from cospec.models.files.gguf_as_folder import NO_TOKENIZER
from cospec.models.files.gguf_config import ARCHITECTURES
from cospec.models.files.gguf_config_writer import (
    WRITABLE,
    Config,
    check_config,
    rope_factors,
    text_config,
    write_config,
)
from cospec.models.files.gguf_file import GgufFile, GgufTensor
from cospec.models.files.gguf_source import GATE_EXPERTS, MODEL_NAMES, UP_EXPERTS, names_of_layers
from cospec.models.files.gguf_tokenizer_writer import TokenizerWriter
from cospec.models.files.source import EMBEDDING, FREQUENCIES, HEAD, WeightSource, block_format
from cospec.models.weights.blocks import BlockFormat
from cospec.registry import WEIGHT_FORMATS

FLOATS = ("f32", "f16", "bf16")
TABLES = "q8_0"  # of embedding and output layer, whose errors count most
_TABLE_NAMES = ("token_embd.weight", "output.weight")
_ROUTER = "ffn_gate_inp.weight"  # stays float32, as llama.cpp's converter writes it
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(?:(\d+)\.)?(\w+_proj)")
_EXPERTS = {"gate_proj": GATE_EXPERTS, "up_proj": UP_EXPERTS, "down_proj": "ffn_down_exps.weight"}


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor of the file.

    Attributes:
        read: returns the values in the order of the file.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def kinds() -> list[str]:
    """Return the types that a file can be written in."""
    blocks = [name for name in WEIGHT_FORMATS if name.startswith(("q", "iq", "mx"))]
    return [*FLOATS, *blocks]


def write_gguf(path: Path, folder: Path, source: WeightSource, kind: str) -> None:
    """Write the model in ``folder`` to ``path``. Linear weights get the type ``kind``, norms and biases float32.

    Rows that are no multiple of the blocks of ``kind`` become Q8_0, and float16 where Q8_0 does not fit either. One
    tensor at a time is in memory.

    Raises:
        InvalidInput: ``kind`` is unknown.
        ModelError: a file cannot hold the model's architecture, its configuration or its tokenizer.
    """
    if kind not in kinds():
        raise InvalidInput("type", kind, ", ".join(kinds()))
    config = text_config(folder)
    if config["model_type"] not in WRITABLE:
        allowed = ", ".join(sorted(WRITABLE))
        raise ModelError(f"The model {folder} is of type {config['model_type']}; allowed in a GGUF file are {allowed}.")
    writer = GGUFWriter(path, WRITABLE[config["model_type"]])
    write_config(writer, config)
    _write_file_type(writer, kind)
    has_tokenizer = (folder / "tokenizer.json").exists()
    tokenizer = TokenizerWriter(folder, config["vocab_size"]) if has_tokenizer else None
    if tokenizer is None:
        writer.add_tokenizer_model(NO_TOKENIZER)  # llama.cpp needs the key
    else:
        tokenizer.write(writer)
    planned = list(_planned(source, config, writer.arch))
    preview = _preview(path, writer, planned)
    check_config(preview, folder, config)
    if tokenizer is not None:
        tokenizer.check(preview)
    _write_tensors(writer, planned, kind)


def _write_file_type(writer: GGUFWriter, kind: str) -> None:
    file_type = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q4_k": "MOSTLY_Q4_K_S"}
    name = file_type.get(kind, f"MOSTLY_{kind.upper()}")
    if name in LlamaFileType.__members__:
        writer.add_file_type(LlamaFileType[name])


def _preview(path: Path, writer: GGUFWriter, planned: list[_Planned]) -> GgufFile:
    """Return the file as it will be read, with values of rotary factors alone."""
    metadata = {name: value.value for name, value in writer.kv_data[0].items()}
    tensors = {each.name: GgufTensor(each.name, each.shape, "f32", np.zeros(0, np.uint8)) for each in planned}
    for each in planned:
        if each.name.startswith("rope_"):
            tensors[each.name] = GgufTensor(each.name, each.shape, "f32", each.read().numpy().view(np.uint8))
    return GgufFile(path, metadata, tensors)


def _write_tensors(writer: GGUFWriter, planned: list[_Planned], kind: str) -> None:
    types = [_kind_of(each, kind) for each in planned]
    for each, type_ in zip(planned, types, strict=True):
        raw = GGMLQuantizationType[type_.upper()]
        count, size = GGML_QUANT_SIZES[raw]
        bytes = prod(each.shape) // count * size
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each, type_ in zip(planned, types, strict=True):
        writer.write_tensor_data(_encoded(each.read().float().contiguous(), type_))
    writer.close()


def _kind_of(tensor: _Planned, kind: str) -> str:
    """Return the type of a tensor: floats in float files, and blocks that divide the rows."""
    if len(tensor.shape) == 1 or tensor.name.endswith(_ROUTER):
        return "f32"
    if kind in FLOATS:
        return kind
    wanted = TABLES if tensor.name in _TABLE_NAMES else kind
    fits = [name for name in (wanted, TABLES) if tensor.shape[-1] % block_format(name).block_size == 0]
    return fits[0] if fits else "f16"


def _encoded(value: Tensor, kind: str) -> NDArray[Any]:
    if kind == "bf16":
        return value.bfloat16().view(torch.uint8).numpy()
    if kind in FLOATS:
        return value.numpy() if kind == "f32" else value.half().numpy()
    format: BlockFormat = block_format(kind)
    return format.quantize(value.numpy().reshape(-1, format.block_size))


def _planned(source: WeightSource, config: Config, architecture: str) -> Iterator[_Planned]:
    """Yield all tensors in llama.cpp's names and order of rows."""
    for name, factors in rope_factors(config).items():
        yield _Planned(name, factors.shape, partial(torch.from_numpy, factors))
    places = _Places(source, config, architecture)
    experts: dict[tuple[str, str], list[str]] = {}
    for name in source.shapes:
        if name.endswith(FREQUENCIES):
            continue
        expert = _EXPERT.match(name)
        if expert is not None and expert[2] is not None:
            experts.setdefault((expert[1], expert[3]), []).append(name)
        elif expert is not None:
            yield from places.joined_experts(name, expert[1], expert[3])
        elif name != HEAD or not config.get("tie_word_embeddings") or EMBEDDING not in source.shapes:
            yield places.tensor(name)
    for (layer, part), names in experts.items():
        yield places.single_experts(layer, part, names)


class _Places:
    """Finds the place in the file of each tensor of a model."""

    def __init__(self, source: WeightSource, config: Config, architecture: str) -> None:
        self._source, self._kind = source, ARCHITECTURES[architecture]
        self._model = {own: name for name, own in MODEL_NAMES.items()}
        self._layer = {own: name for name, own in names_of_layers(architecture).items()}
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        self._heads = {"attn_q": heads, "attn_k": kv_heads} if self._kind.rotated_pairs else {}

    def tensor(self, name: str) -> _Planned:
        """Return the place of a tensor that is one tensor of the file too."""
        module, _, last = name.rpartition(".")
        if module in self._model:
            found, place = self._model[module], f"{self._model[module]}.{last}"
        else:
            _, _, number, own = [*module.split(".", 3), "", "", ""][:4]
            if own not in self._layer or last not in ("weight", "bias"):
                raise ModelError(f"The weights have the tensor {name}, for which GGUF files have no name.")
            found, place = self._layer[own], f"blk.{number}.{self._layer[own]}.{last}"
        offset = self._kind.norm_offset if module.endswith("norm") else 0.0
        read = partial(self._read, name, self._heads.get(found, 0), offset)
        return _Planned(place, self._source.shapes[name], read)

    def joined_experts(self, name: str, layer: str, part: str) -> Iterator[_Planned]:
        """Yield the places of a tensor with all experts of a layer."""
        count, rows, columns = self._source.shapes[name]
        halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for number, half in enumerate(halves):
            read = partial(self._part, name, number, len(halves))
            yield _Planned(f"blk.{layer}.{_EXPERTS[half]}", (count, rows // len(halves), columns), read)

    def single_experts(self, layer: str, part: str, names: list[str]) -> _Planned:
        """Return the place of tensors with one expert each."""
        ordered = sorted(names, key=lambda name: int(name.split(".")[5]))
        shape = len(ordered), *self._source.shapes[ordered[0]]
        return _Planned(f"blk.{layer}.{_EXPERTS[part]}", shape, partial(self._stacked, ordered))

    def _read(self, name: str, heads: int, offset: float) -> Tensor:
        value = self._source.read(name)
        if heads:
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        return value.float() + offset if offset else value

    def _part(self, name: str, number: int, count: int) -> Tensor:
        return self._source.read(name).chunk(count, 1)[number]

    def _stacked(self, names: list[str]) -> Tensor:
        return torch.stack([self._source.read(name) for name in names])
