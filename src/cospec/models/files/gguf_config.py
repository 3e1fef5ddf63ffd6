"""The configuration of a GGUF model in transformers' words.

llama.cpp's converters leave out what its code knows, such as the scale of Gemma's attention. Each architecture below
adds these values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cospec.errors import ModelError
from cospec.models.files.gguf_file import GgufFile, GgufTensor
from cospec.models.files.gguf_values import GgufValues

LAYER = re.compile(r"blk\.(\d{1,9})\.")
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


@dataclass(frozen=True, slots=True)
class Architecture:
    """How transformers calls an architecture of llama.cpp.

    Attributes:
        model_type, model_class: names in transformers.
        rotated_pairs: the converter put the two halves of each head in turns, in queries and keys.
        norm_offset: the converter adds this number to the weights of norms.
        extra: makes the values of the configuration that only this architecture has.
    """

    model_type: str
    model_class: str
    rotated_pairs: bool = False
    norm_offset: float = 0.0
    extra: Callable[[Values], dict[str, Any]] = lambda values: {}


class Values(GgufValues):
    """The metadata of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file, file.architecture)

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """The tensors of the file."""
        return self.file.tensors

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        given = self.integer("attention.key_length", 0)
        return given or self.required("embedding_length") // self.required("attention.head_count")

    @property
    def length(self) -> int:
        """The longest context of the original model."""
        return self.integer("rope.scaling.original_context_length", 0) or self.required("context_length")

    def tensor(self, name: str, dimensions: int) -> GgufTensor:
        """Return a tensor that the file must have."""
        found = self.tensors.get(name)
        if found is None or len(found.shape) != dimensions:
            raise ModelError(f"The file {self.file.path} lacks the tensor {name} with {dimensions} dimensions.")
        return found

    def factors(self, name: str, count: int) -> list[float]:
        """Return the factors of rotary frequencies in a tensor."""
        found = self.tensor(name, 1)
        if found.type != "f32" or found.shape != (count,):
            shown = f"{found.type} {list(found.shape)}"
            raise ModelError(f"The tensor {name} of {self.file.path} is {shown}; allowed is f32 [{count}].")
        return [float(each) for each in found.data.view("<f4")]


def _llama(values: Values) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in values.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in values.tensors,
    }


def _gemma_scale(values: Values, large: int) -> int:
    """Return ``query_pre_attn_scalar``: the models of 27 B, known by their layers, have another."""
    if values.required("block_count") == large:
        return values.required("embedding_length") // values.required("attention.head_count")
    return values.head_dim


def _gemma2(values: Values) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": values.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.real("final_logit_softcapping", 30.0),
        "sliding_window": values.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _gemma_scale(values, 46),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(values: Values) -> dict[str, Any]:
    scaling = values.real("rope.scaling.factor", 1.0)
    scaled = {"rope_type": "linear", "factor": scaling} if scaling != 1.0 else {"rope_type": "default"}
    return {
        "sliding_window": values.integer("attention.sliding_window", 1024),
        "query_pre_attn_scalar": _gemma_scale(values, 62),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": values.real("final_logit_softcapping", None),
        "rope_parameters": {
            "full_attention": {"rope_theta": values.real("rope.freq_base", 1e6), **scaled},
            "sliding_attention": {"rope_theta": values.real("rope.freq_base_swa", 1e4), "rope_type": "default"},
        },
    }


def _granite(values: Values) -> dict[str, Any]:
    return _llama(values) | {
        "embedding_multiplier": values.real("embedding_scale", 1.0),
        "residual_multiplier": values.real("residual_scale", 1.0),
        "logits_scaling": values.real("logit_scale", 1.0),
        "attention_multiplier": values.real("attention.scale", values.head_dim**-0.5),
    }


def _phi3(values: Values) -> dict[str, Any]:
    return {
        "sliding_window": values.integer("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": values.length,
    }


def _qwen3_moe(values: Values) -> dict[str, Any]:
    return {
        "num_experts": values.required("expert_count"),
        "num_experts_per_tok": values.required("expert_used_count"),
        "moe_intermediate_size": values.required("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", rotated_pairs=True, extra=_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", extra=_qwen3_moe),
    "gemma": Architecture(
        "gemma", "GemmaForCausalLM", norm_offset=1.0, extra=lambda _: {"hidden_activation": "gelu_pytorch_tanh"}
    ),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", norm_offset=1.0, extra=_gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", norm_offset=1.0, extra=_gemma3),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", extra=_phi3),
    "granite": Architecture("granite", "GraniteForCausalLM", rotated_pairs=True, extra=_granite),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", rotated_pairs=True, extra=_llama),
    "olmo": Architecture(
        "olmo", "OlmoForCausalLM", rotated_pairs=True, extra=lambda v: {"clip_qkv": v.real("attention.clamp_kqv", None)}
    ),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM"),
}
"""Architectures by llama.cpp's names."""


def architecture(file: GgufFile) -> Architecture:
    """Return the architecture of a file.

    Raises:
        ModelError: the architecture is unknown.
    """
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        allowed = ", ".join(ARCHITECTURES)
        raise ModelError(f"The file {file.path} has the GGUF architecture {file.architecture}; allowed are {allowed}.")
    return found


def read_config(file: GgufFile) -> dict[str, Any]:
    """Return the contents of ``config.json`` for a file.

    Raises:
        ModelError: the architecture is unknown, or a required value is missing.
    """
    kind, values = architecture(file), Values(file)
    layers = 1 + max([int(found[1]) for name in file.tensors if (found := LAYER.match(name))], default=-1)
    number = values.required("block_count", 0)
    if number != layers or not layers:
        raise ModelError(f"The file {file.path} declares {number} layers, but has tensors of {layers}.")
    vocabulary = values.tensor("token_embd.weight", 2).shape[0]
    config = {
        "architectures": [kind.model_class],
        "model_type": kind.model_type,
        "vocab_size": vocabulary,
        "hidden_size": values.required("embedding_length"),
        "intermediate_size": values.required("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": values.required("attention.head_count"),
        "num_key_value_heads": values.required("attention.head_count_kv"),
        "head_dim": values.head_dim,
        "max_position_embeddings": values.required("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": token_id(file, "bos", vocabulary),
        "eos_token_id": token_id(file, "eos", vocabulary),
        "pad_token_id": token_id(file, "padding", vocabulary),
        "rope_parameters": _rope(values),
    }
    eps = values.real("attention.layer_norm_rms_epsilon", None)
    return config | ({} if eps is None else {"rms_norm_eps": eps}) | kind.extra(values)


def token_id(file: GgufFile, name: str, vocabulary: int) -> int | None:
    """Return the id of a token that the file names; None of an id outside the vocabulary."""
    found = GgufValues(file, "tokenizer.ggml").integer(f"{name}_token_id", vocabulary, least=-1)
    return found if 0 <= found < vocabulary else None


def _rope(values: Values) -> dict[str, Any]:
    """Return ``rope_parameters``.

    A tensor of factors, as of Llama 3, becomes long-rope factors that are the same for every length.
    """
    given: dict[str, Any] = {"rope_theta": values.real("rope.freq_base", 1e4), "rope_type": "default"}
    rotated, path = values.integer("rope.dimension_count", values.head_dim), values.file.path
    if rotated != values.head_dim:
        if rotated % 2 or not 0 < rotated < values.head_dim:
            allowed = f"an even number from 2 to {values.head_dim}, the numbers of a head"
            raise ModelError(f"The file {path} rotates {rotated} numbers (rope.dimension_count); allowed is {allowed}.")
        given["partial_rotary_factor"] = rotated / values.head_dim
    kind, factor = values.text("rope.scaling.type", "none"), values.real("rope.scaling.factor", 1.0)
    if ROPE_FACTORS in values.tensors:
        factors = values.factors(ROPE_FACTORS, rotated // 2)
        return given | _longrope(factors, factors, values.required("context_length"), 1.0)
    if LONG_FACTORS in values.tensors:
        long, short = values.factors(LONG_FACTORS, rotated // 2), values.factors(SHORT_FACTORS, rotated // 2)
        return given | _longrope(long, short, values.length, values.real("rope.scaling.attn_factor", None))
    if kind == "none" or factor in (0.0, 1.0):
        return given
    if kind == "linear":
        return given | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return given | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": values.length}
    raise ModelError(f"The file {path} scales rotary embeddings by {kind}; allowed are none, linear and yarn.")


def _longrope(long: list[float], short: list[float], length: int, attention: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    found["original_max_position_embeddings"] = length
    return found if attention is None else found | {"attention_factor": attention}
