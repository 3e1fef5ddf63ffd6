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

LAYER = re.compile(r"blk\.(\d{1,9})\.")
ROPE_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


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


class Values:
    """The metadata of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._all = file.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``ARCHITECTURE.key``."""
        return self._all.get(f"{self._file.architecture}.{key}", default)

    def number(self, key: str) -> Any:
        """Return a required value; values of all layers must be equal.

        Raises:
            ModelError: the value is missing, or differs between layers.
        """
        found = self.get(key)
        several = found if isinstance(found, list) else [found]
        if found is None or len(set(several)) != 1:
            problem = "lacks" if found is None else "has different layers in"
            raise ModelError(f"The file {self._file.path} {problem} {self._file.architecture}.{key}.")
        return several[0]

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """The tensors of the file."""
        return self._file.tensors

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        given = self.get("attention.key_length")
        return int(given or self.number("embedding_length") // self.number("attention.head_count"))


def _llama(values: Values) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in values.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in values.tensors,
    }


def _gemma_scale(values: Values, large: int) -> int:
    """Return ``query_pre_attn_scalar``: the models of 27 B, known by their layers, have another."""
    if values.number("block_count") == large:
        return int(values.number("embedding_length") // values.number("attention.head_count"))
    return values.head_dim


def _gemma2(values: Values) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
        "sliding_window": values.get("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _gemma_scale(values, 46),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(values: Values) -> dict[str, Any]:
    scaling = values.get("rope.scaling.factor", 1.0)
    scaled = {"rope_type": "linear", "factor": scaling} if scaling != 1.0 else {"rope_type": "default"}
    return {
        "sliding_window": values.get("attention.sliding_window", 1024),
        "query_pre_attn_scalar": _gemma_scale(values, 62),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {"rope_theta": values.get("rope.freq_base", 1e6), **scaled},
            "sliding_attention": {"rope_theta": values.get("rope.freq_base_swa", 1e4), "rope_type": "default"},
        },
    }


def _granite(values: Values) -> dict[str, Any]:
    return _llama(values) | {
        "embedding_multiplier": values.get("embedding_scale", 1.0),
        "residual_multiplier": values.get("residual_scale", 1.0),
        "logits_scaling": values.get("logit_scale", 1.0),
        "attention_multiplier": values.get("attention.scale", values.head_dim**-0.5),
    }


def _phi3(values: Values) -> dict[str, Any]:
    length = values.get("rope.scaling.original_context_length", values.number("context_length"))
    return {
        "sliding_window": values.get("attention.sliding_window") or None,
        "original_max_position_embeddings": length,
    }


def _qwen3_moe(values: Values) -> dict[str, Any]:
    return {
        "num_experts": values.number("expert_count"),
        "num_experts_per_tok": values.number("expert_used_count"),
        "moe_intermediate_size": values.number("expert_feed_forward_length"),
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
        "olmo", "OlmoForCausalLM", rotated_pairs=True, extra=lambda v: {"clip_qkv": v.get("attention.clamp_kqv")}
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
    if values.number("block_count") != layers or not layers:
        number = values.number("block_count")
        raise ModelError(f"The file {file.path} declares {number} layers, but has tensors of {layers}.")
    config = {
        "architectures": [kind.model_class],
        "model_type": kind.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": values.number("embedding_length"),
        "intermediate_size": values.number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": values.number("attention.head_count"),
        "num_key_value_heads": values.number("attention.head_count_kv"),
        "head_dim": values.head_dim,
        "max_position_embeddings": values.number("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _rope(file, values),
    }
    eps = values.get("attention.layer_norm_rms_epsilon")
    return config | ({} if eps is None else {"rms_norm_eps": eps}) | kind.extra(values)


def _rope(file: GgufFile, values: Values) -> dict[str, Any]:
    """Return ``rope_parameters``.

    A tensor of factors, as of Llama 3, becomes long-rope factors that are the same for every length.
    """
    given: dict[str, Any] = {"rope_theta": values.get("rope.freq_base", 1e4), "rope_type": "default"}
    rotated = values.get("rope.dimension_count", values.head_dim)
    if rotated != values.head_dim:
        given["partial_rotary_factor"] = rotated / values.head_dim
    kind, factor = values.get("rope.scaling.type", "none"), values.get("rope.scaling.factor", 1.0)
    length = values.get("rope.scaling.original_context_length", values.number("context_length"))
    if ROPE_FACTORS in values.tensors:
        factors = _floats(values.tensors[ROPE_FACTORS])
        return given | _longrope(factors, factors, values.number("context_length"), 1.0)
    if _LONG in values.tensors:
        long, short = _floats(values.tensors[_LONG]), _floats(values.tensors[_SHORT])
        return given | _longrope(long, short, length, values.get("rope.scaling.attn_factor"))
    if kind == "none" or factor in (0.0, 1.0):
        return given
    if kind == "linear":
        return given | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return given | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    raise ModelError(f"The file {file.path} scales rotary embeddings by {kind}; allowed are none, linear and yarn.")


def _longrope(long: list[float], short: list[float], length: int, attention: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    found["original_max_position_embeddings"] = length
    return found if attention is None else found | {"attention_factor": attention}


def _floats(tensor: GgufTensor) -> list[float]:
    return [float(each) for each in tensor.data.view("<f4").ravel()]
