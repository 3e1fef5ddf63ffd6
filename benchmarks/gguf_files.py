"""GGUF files with random weights in the shapes of known models.

With ``successors``, greedy decoding follows a given table of next tokens, whatever the layers compute. The row of the
output layer for a successor is the embedding of its predecessor. The embedding outweighs the sum of the layers, and
random rows of it are nearly orthogonal. So the acceptance of a draft model is known: the share of tokens after which
both tables agree. All weights are read and multiplied as in any model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from transformers.convert_slow_tokenizer import bytes_to_unicode

SUPER_BLOCK = 256  # weights of a block of Q4_K and Q6_K
WORDS = 512  # tokens below are bytes and other short tokens; successors lead to none of them
EMBEDDING_GAIN = 30_000  # with successors; an embedding then outweighs the sum of the layers


ROUTER = "ffn_gate_inp.weight"  # in float32, as llama.cpp's converter writes it


@dataclass(frozen=True, slots=True)
class Model:
    """A shape; the output layer is the embedding.

    Attributes:
        inner: intermediate numbers, of each expert in a mixture.
        experts: of a layer; 0 without a mixture.
        chosen: experts of a token.
    """

    name: str
    architecture: str
    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int
    experts: int = field(default=0, kw_only=True)
    chosen: int = field(default=0, kw_only=True)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of the file."""
        dim = self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.vocabulary, self.hidden),
            "output_norm.weight": (self.hidden,),
        }
        for layer in range(self.layers):
            block = f"blk.{layer}."
            sizes = {"attn_q": self.heads * dim, "attn_k": self.kv_heads * dim, "attn_v": self.kv_heads * dim}
            found |= {f"{block}{name}.weight": (size, self.hidden) for name, size in sizes.items()}
            if self.architecture == "qwen2":
                found |= {f"{block}{name}.bias": (size,) for name, size in sizes.items()}
            if self.architecture.startswith("qwen3"):
                found |= {f"{block}{name}.weight": (dim,) for name in ("attn_q_norm", "attn_k_norm")}
            found |= {f"{block}{name}.weight": (self.hidden,) for name in ("attn_norm", "ffn_norm")}
            found[f"{block}attn_output.weight"] = (self.hidden, self.heads * dim)
            if self.experts:
                found[f"{block}{ROUTER}"] = (self.experts, self.hidden)
            kind, each = ("_exps", (self.experts,)) if self.experts else ("", ())
            found |= {
                f"{block}{name}{kind}.weight": (*each, self.inner, self.hidden) for name in ("ffn_gate", "ffn_up")
            }
            found[f"{block}ffn_down{kind}.weight"] = (*each, self.hidden, self.inner)
        return found

    def bytes_of_one_row(self, kind: str) -> float:
        """Return the bytes that a forward of one token reads: all tensors, and of a mixture the chosen experts."""
        total = 0.0
        for name, shape in self.tensors.items():
            size, count = GGML_QUANT_SIZES[GGMLQuantizationType[type_of(name, shape, kind, self.layers).upper()]]
            total += prod(shape) / size * count * (self.chosen / self.experts if len(shape) == 3 else 1)
        return total


MODELS = {
    model.name: model
    for model in (
        Model("Qwen2.5-0.5B", "qwen2", 896, 24, 4864, 14, 2, 151936, 64),
        Model("Llama-3.2-1B", "llama", 2048, 16, 8192, 32, 8, 128256, 64),
        Model("Qwen3-1.7B", "qwen3", 2048, 28, 6144, 16, 8, 151936, 128),
        Model("Qwen3-4B", "qwen3", 2560, 36, 9728, 32, 8, 151936, 128),
        Model("Qwen3-30B-A3B-8-layers", "qwen3moe", 2048, 8, 768, 32, 4, 151936, 128, experts=128, chosen=8),
    )
}
TYPES = ("q4_0", "q4_k_m", "q8_0", "bf16")  # that are compared with llama.cpp
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15, "q5_k": 16, "q6_k": 18, "iq4_nl": 25, "bf16": 32, "mxfp4": 38}
"""Of most weights of a file, as llama.cpp numbers the types."""
SCALES = {
    "q4_0": {0: 0.004},
    "q8_0": {0: 0.0003},
    "q4_k": {0: 1e-4, 2: 7e-4},
    "q5_k": {0: 5e-5, 2: 7e-4},
    "q6_k": {208: 1e-5},
    "iq4_nl": {0: 0.0003},
}
"""Bytes of a block where its float16 scales stand, and the scales."""


def type_of(tensor: str, shape: tuple[int, ...], kind: str, layers: int) -> str:
    """Return the type of a tensor; Q4_K_M mixes two types of blocks, as llama.cpp's quantization does."""
    if len(shape) == 1 or tensor.endswith(ROUTER):
        return "f32"
    if kind != "q4_k_m":
        return "q8_0" if tensor == "token_embd.weight" and kind != "bf16" else kind
    if tensor == "token_embd.weight":
        return "q6_k"
    layer, part = int(tensor.split(".")[1]), tensor.split(".")[2].removesuffix("_exps")
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "q6_k" if more and part in {"attn_v", "ffn_down"} else "q4_k"


def random_blocks(
    kind: str, shape: tuple[int, ...], generator: np.random.Generator, gain: float = 1.0
) -> NDArray[np.uint8]:
    """Return rows of random blocks, all with the same scales, or of random bf16 numbers; times ``gain``."""
    if kind == "bf16":
        words = generator.normal(0.0, 0.02 * gain, shape).astype(np.float32).view(np.uint16)
        return np.ascontiguousarray(words[..., 1::2]).view(np.uint8)
    size, count = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    blocks = np.frombuffer(generator.bytes(prod(shape) // size * count), np.uint8).reshape(-1, count).copy()
    if kind == "mxfp4":  # the first byte is the exponent of a power of two
        blocks[:, 0] = 120 + round(np.log2(gain))
        return blocks.reshape(*shape[:-1], -1)
    for at, scale in SCALES[kind].items():
        blocks[:, at : at + 2] = np.array([gain * scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def one_cycle(vocabulary: int, seed: int = 0) -> NDArray[np.int64]:
    """Return a successor for each token; from ``WORDS`` on, the successors form one cycle of random order."""
    order = np.random.default_rng(seed).permutation(np.arange(WORDS, vocabulary))
    successors = np.arange(vocabulary)
    successors[order] = np.roll(order, -1)
    return successors


def with_errors(successors: NDArray[np.int64], right: float, seed: int = 1) -> NDArray[np.int64]:
    """Return successors that agree with the given ones after a share ``right`` of the tokens, drawn at random."""
    found = successors.copy()
    chosen = WORDS + np.flatnonzero(np.random.default_rng(seed).random(len(successors) - WORDS) >= right)
    found[chosen] = np.roll(successors[chosen], 1)
    return found


def write_file(path: Path, model: Model, kind: str, successors: NDArray[np.int64] | None = None) -> None:
    """Write a GGUF file with a made-up vocabulary; the embedding has 8 bits, 6 in Q4_K_M, 16 in bf16.

    Args:
        successors: ``[vocabulary]``, the greedy token after each token, a permutation. The file then has an output
            layer of its own. Without successors the output layer is the embedding.
    """
    generator, writer = np.random.default_rng(0), GGUFWriter(path, model.architecture)
    _describe(writer, model, kind)
    for name, shape in model.tensors.items():
        own = type_of(name, shape, kind, model.layers)
        if own == "f32":
            router = len(shape) > 1
            value = generator.normal(0.0, 0.02, shape) if router else np.full(shape, float(not name.endswith("bias")))
            writer.add_tensor(name, value.astype(np.float32))
            continue
        linked = successors is not None and name == "token_embd.weight"
        blocks = random_blocks(own, shape, generator, EMBEDDING_GAIN if linked else 1.0)
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[own.upper()])
        if linked:
            rows = np.empty_like(blocks)
            rows[successors] = blocks
            writer.add_tensor("output.weight", rows, raw_dtype=GGMLQuantizationType[own.upper()])
    finish(writer)


def finish(writer: GGUFWriter) -> None:
    """Write what was added, and close the file."""
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def add_shape(writer: GGUFWriter, model: Model, context: int) -> None:
    """Add the sizes of a model, and its longest context, to the metadata."""
    writer.add_context_length(context)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.inner)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    if model.experts:
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.chosen)
        writer.add_expert_feed_forward_length(model.inner)


def _describe(writer: GGUFWriter, model: Model, kind: str) -> None:
    """Add sizes and vocabulary to the metadata."""
    writer.add_file_type(FILE_TYPES[kind])
    add_shape(writer, model, 32_768)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(model.vocabulary)
    tokens = [*bytes_to_unicode().values(), "ab", "<|endoftext|>"]
    end = len(tokens) - 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"t{number}" for number in range(len(tokens), model.vocabulary))])
    writer.add_token_types([3 if number == end else 1 for number in range(model.vocabulary)])  # 3 is a control token
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(end)
