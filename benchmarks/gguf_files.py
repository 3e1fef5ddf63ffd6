"""GGUF files with random weights in the shapes of known models.

With ``successors``, greedy decoding follows a given table of next tokens, whatever the layers compute. The row of the
output layer for a successor is the embedding of its predecessor. The embedding outweighs the sum of the layers, and
random rows of it are nearly orthogonal. So the acceptance of a draft model is known: the share of tokens after which
both tables agree. All weights are read and multiplied as in any model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from transformers.convert_slow_tokenizer import bytes_to_unicode

SUPER_BLOCK = 256  # weights of a block of Q4_K and Q6_K
WORDS = 512  # tokens below are bytes and other short tokens; successors lead to none of them
EMBEDDING_GAIN = 30_000  # with successors; an embedding then outweighs the sum of the layers


@dataclass(frozen=True, slots=True)
class Model:
    """A shape; the output layer is the embedding."""

    name: str
    architecture: str
    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int

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
            if self.architecture == "qwen3":
                found |= {f"{block}{name}.weight": (dim,) for name in ("attn_q_norm", "attn_k_norm")}
            found |= {f"{block}{name}.weight": (self.hidden,) for name in ("attn_norm", "ffn_norm")}
            found[f"{block}attn_output.weight"] = (self.hidden, self.heads * dim)
            found |= {f"{block}{name}.weight": (self.inner, self.hidden) for name in ("ffn_gate", "ffn_up")}
            found[f"{block}ffn_down.weight"] = (self.hidden, self.inner)
        return found


MODELS = {
    model.name: model
    for model in (
        Model("Qwen2.5-0.5B", "qwen2", 896, 24, 4864, 14, 2, 151936, 64),
        Model("Llama-3.2-1B", "llama", 2048, 16, 8192, 32, 8, 128256, 64),
        Model("Qwen3-1.7B", "qwen3", 2048, 28, 6144, 16, 8, 151936, 128),
        Model("Qwen3-4B", "qwen3", 2560, 36, 9728, 32, 8, 151936, 128),
    )
}
TYPES = ("q4_0", "q4_k_m", "q8_0")  # that are compared with llama.cpp
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15, "q5_k": 16, "q6_k": 18, "iq4_nl": 25}
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


def type_of(tensor: str, kind: str, layers: int) -> str:
    """Return the block type of a weight; Q4_K_M mixes two types, as llama.cpp's quantization does."""
    if kind != "q4_k_m":
        return "q8_0" if tensor == "token_embd.weight" else kind
    if tensor == "token_embd.weight":
        return "q6_k"
    layer, part = int(tensor.split(".")[1]), tensor.split(".")[2]
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "q6_k" if more and part in {"attn_v", "ffn_down"} else "q4_k"


def random_blocks(
    kind: str, shape: tuple[int, ...], generator: np.random.Generator, gain: float = 1.0
) -> NDArray[np.uint8]:
    """Return rows of random blocks, all with the same scales, times ``gain``."""
    size, count = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    blocks = np.frombuffer(generator.bytes(shape[0] * shape[1] // size * count), np.uint8).reshape(-1, count).copy()
    for at, scale in SCALES[kind].items():
        blocks[:, at : at + 2] = np.array([gain * scale], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


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
    """Write a GGUF file with a made-up vocabulary; the embedding has 8 bits, or 6 in Q4_K_M.

    Args:
        successors: ``[vocabulary]``, the greedy token after each token, a permutation. The file then has an output
            layer of its own. Without successors the output layer is the embedding.
    """
    generator, writer = np.random.default_rng(0), GGUFWriter(path, model.architecture)
    _describe(writer, model, kind)
    for name, shape in model.tensors.items():
        if len(shape) == 1:
            writer.add_tensor(name, np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32))
            continue
        own = type_of(name, kind, model.layers)
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


def _describe(writer: GGUFWriter, model: Model, kind: str) -> None:
    """Add sizes and vocabulary to the metadata."""
    writer.add_file_type(FILE_TYPES[kind])
    add_shape(writer, model, 4096)
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
