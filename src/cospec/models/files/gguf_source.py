"""The tensors of a GGUF model by transformers' names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from cospec.errors import InvalidInput, ModelError
from cospec.models.files.gguf_block_conversions import CONVERSIONS
from cospec.models.files.gguf_config import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Values,
    architecture,
    read_config,
)
from cospec.models.files.gguf_file import GgufFile, GgufTensor
from cospec.models.files.source import PackedWeight, WeightSource
from cospec.registry import WEIGHT_FORMATS

MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN = {
    "gemma2": {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
    "olmo2": _POST_NORMS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate", "ffn_down_exps": "mlp.experts.down_proj"},
}
GATE_EXPERTS, UP_EXPERTS = "ffn_gate_exps.weight", "ffn_up_exps.weight"
# Tensors that the configuration replaces.
_REPLACED = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TYPES = (
    *_FLOATS, "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
    "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "mxfp4",
)  # fmt: skip
"""Types of tensors that can be read."""
_FORMATS = {kind: kind for kind in TYPES if kind in WEIGHT_FORMATS and kind not in _FLOATS}
_FORMATS |= {kind: conversion.format for kind, conversion in CONVERSIONS.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor in transformers' words: tensors of the file, joined along the rows of each expert.

    Attributes:
        heads: of queries or keys whose rows llama.cpp's converter rearranged; 0 of other tensors.
        offset: that the converter added.
    """

    tensors: tuple[GgufTensor, ...]
    heads: int = 0
    offset: float = 0.0


class GgufSource(WeightSource):
    """Reads tensors from mapped blocks.

    Raises:
        ModelError: the architecture, or the type or name of a tensor, is unknown.
    """

    packed = True

    def __init__(self, path: Path) -> None:
        self.file = GgufFile.open(path, texts=False)
        self._entries = _entries(self.file)
        self.shapes = {name: _shape(entry) for name, entry in self._entries.items()}
        formats = {
            name: {_FORMATS.get(tensor.type) for tensor in entry.tensors} for name, entry in self._entries.items()
        }
        self.kinds = {
            name: kind
            for name, (kind, *others) in formats.items()
            if kind and not others and len(self.shapes[name]) > 1
        }
        self.float16 = {
            name for name, entry in self._entries.items() if {tensor.type for tensor in entry.tensors} == {"f16"}
        }
        self.quantized = {
            name: PackedWeight("+".join(sorted(own)), sum(tensor.data.nbytes for tensor in entry.tensors))
            for name, entry in self._entries.items()
            if len(self.shapes[name]) > 1 and not (own := {tensor.type for tensor in entry.tensors}) <= set(_FLOATS)
        }
        types = self.types()
        most = max(types, key=lambda name: types[name])
        self.dtype = torch.bfloat16 if most == "bf16" else torch.float32  # float16 would round the norms

    def read(self, name: str) -> Tensor:
        """See ``WeightSource``."""
        entry = self._entries[name]
        read = [_value(tensor, rows) for tensor, rows in zip(entry.tensors, self._rows(entry), strict=True)]
        found = read[0] if len(read) == 1 else torch.cat(read, dim=1)
        return found - entry.offset if entry.offset else found

    def has_rows(self, name: str) -> bool:
        """See ``WeightSource``."""
        entry = self._entries[name]
        return len(entry.tensors) == 1 and not entry.heads and not entry.offset

    def row(self, name: str, number: int) -> Tensor:
        """See ``WeightSource``."""
        if not self.has_rows(name):
            return super().row(name, number)
        tensor = self._entries[name].tensors[0]
        part = replace(tensor, shape=(1, tensor.shape[-1]), data=tensor.data[number : number + 1])
        return _value(part, part.data)[0]

    def blocks(self, name: str) -> Tensor:
        """See ``WeightSource``; the result is mapped unless rows change places, or tensors are converted or joined.

        Raises:
            InvalidInput: a tensor has a scale that its format cannot hold.
        """
        entry = self._entries[name]
        rows = [self._converted(tensor, rows) for tensor, rows in zip(entry.tensors, self._rows(entry), strict=True)]
        joined = rows[0] if len(rows) == 1 else np.concatenate(rows, 1)
        return torch.from_numpy(joined.reshape(-1, joined.shape[-1]))

    def types(self) -> dict[str, int]:
        """Return the bytes of each type of tensor."""
        found: dict[str, int] = {}
        for tensor in self.file.tensors.values():
            found[tensor.type] = found.get(tensor.type, 0) + tensor.data.nbytes
        return found

    def _converted(self, tensor: GgufTensor, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return rows of a tensor in the blocks of its format."""
        if tensor.type not in CONVERSIONS:
            return rows
        try:
            return CONVERSIONS[tensor.type].rows(rows)
        except InvalidInput as error:
            raise error.within(f"{tensor.name} of {self.file.path}") from None

    def _rows(self, entry: _Entry) -> list[NDArray[np.uint8]]:
        """Return the bytes of each row, in transformers' order of rows."""
        if not entry.heads:
            return [tensor.data for tensor in entry.tensors]
        return [_in_halves(tensor, entry.heads) for tensor in entry.tensors]


def _in_halves(tensor: GgufTensor, heads: int) -> NDArray[np.uint8]:
    """Return the rows of each head as two halves; llama.cpp's order takes rows from both halves in turns."""
    if len(tensor.shape) == 1:  # a bias
        numbers = tensor.data.reshape(heads, -1, 2, tensor.data.shape[0] // tensor.shape[0])
        return np.ascontiguousarray(numbers.swapaxes(1, 2)).reshape(tensor.data.shape)
    rows = tensor.data.reshape(heads, -1, 2, tensor.data.shape[-1])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(tensor.data.shape)


def _value(tensor: GgufTensor, rows: NDArray[np.uint8]) -> Tensor:
    """Return the value of a tensor, from its rows."""
    dtype = _FLOATS.get(tensor.type)
    if dtype is not None:
        return torch.frombuffer(bytearray(rows.tobytes()), dtype=dtype).reshape(tensor.shape)
    value = dequantize(rows, GGMLQuantizationType[tensor.type.upper()])
    return torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32)).reshape(tensor.shape)


def _entries(file: GgufFile) -> dict[str, _Entry]:
    kind, config, values = architecture(file), read_config(file), Values(file)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    layer_names = names_of_layers(file.architecture)
    found: dict[str, _Entry] = {}
    for name, tensor in file.tensors.items():
        if name in _REPLACED:
            continue
        _check_type(file, tensor)
        part, _, last = name.rpartition(".")
        block, _, own = part.removeprefix("blk.").partition(".")
        if name.endswith((GATE_EXPERTS, UP_EXPERTS)) and file.architecture == "qwen3moe":
            joined = tuple(values.tensor(f"blk.{block}.{suffix}", 3) for suffix in (GATE_EXPERTS, UP_EXPERTS))
            found[f"model.layers.{block}.mlp.experts.gate_up_proj"] = _Entry(joined)
            continue
        place = layer_names.get(own) if part.startswith("blk.") else MODEL_NAMES.get(part)
        if place is None or last not in ("weight", "bias"):
            raise ModelError(f"The file {file.path} has the tensor {name}, which {file.architecture} does not have.")
        ending = "" if own.endswith("_exps") else f".{last}"
        whole = f"model.layers.{block}.{place}" if part.startswith("blk.") else place
        rotated = heads.get(own, 0) if kind.rotated_pairs else 0
        offset = kind.norm_offset if place.endswith("norm") else 0.0
        found[whole + ending] = _Entry((tensor,), rotated, offset)
    return found


def names_of_layers(architecture: str) -> dict[str, str]:
    """Return transformers' names of the modules of a layer by llama.cpp's names."""
    return _LAYER | _OWN.get(architecture, {})


def _check_type(file: GgufFile, tensor: GgufTensor) -> None:
    if tensor.type not in TYPES:
        allowed = ", ".join(TYPES)
        raise ModelError(f"The tensor {tensor.name} of {file.path} has the type {tensor.type}; allowed are {allowed}.")


def _shape(entry: _Entry) -> tuple[int, ...]:
    first = entry.tensors[0].shape
    if len(entry.tensors) == 1:
        return first
    return first[0], sum(tensor.shape[1] for tensor in entry.tensors), *first[2:]
