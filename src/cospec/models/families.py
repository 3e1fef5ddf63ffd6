"""The families of Llama: names and shapes of tensors, windows, scales and other facts by a model's configuration.

One forward serves all families. A family differs in its norms, in factors and bounds, and in which positions rotate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from cospec.models.files.source import EMBEDDING, HEAD
from cospec.models.rotary import ROPE_TYPES
from cospec.native import operators

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """What is the same in all models of a family.

    Attributes:
        norms: modules of a layer: before attention, before the feed-forward, after each of the two; empty: none.
        norm_offset: added to the weights of norms.
        window: which layers have the configuration's window: none, all, or those of the type ``sliding_attention``.
        qk_norm: whether queries and keys have norms: none, of each head, or of all heads together.
        biases: which projections of attention have a bias: all if the configuration says so, none, or queries, keys
            and values.
        joined: whether a file joins the projections of one input.
    """

    norms: tuple[str, str, str, str] = ("input_layernorm", "post_attention_layernorm", "", "")
    norm_offset: float = 0.0
    window: Literal["none", "all", "by type"] = "none"
    qk_norm: Literal["none", "each", "all"] = "none"
    biases: Literal["by option", "none", "qkv"] = "by option"
    joined: bool = False


_AROUND = ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window="all", biases="none"),
    "qwen2": Family(window="by type", biases="qkv"),
    "qwen3": Family(window="by type", qk_norm="each"),
    "qwen3_moe": Family(window="all", qk_norm="each"),
    "granite": Family(),
    "smollm3": Family(window="by type"),
    "phi3": Family(window="all", biases="none", joined=True),
    "olmo2": Family(("", "", "post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="all"),
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(_AROUND, norm_offset=1.0, window="by type"),
    "gemma3_text": Family(_AROUND, norm_offset=1.0, window="by type", qk_norm="each"),
}
"""Families by transformers' ``model_type``."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Multipliers and bounds of a model.

    Attributes:
        embedding, residual, logits: multiply embeddings, the outputs of attention and feed-forward, and logits.
        attention_softcap, logit_softcap: ``cap * tanh(x / cap)`` bounds scores and logits; 0 does not.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0


def why_not(config: Any) -> str:
    """Return why the forward cannot run a model, as an ending of "because it ..."; empty if supported."""
    kind = getattr(config, "model_type", "")
    if kind not in FAMILIES:
        return f"is of type {kind}, not {', '.join(FAMILIES)}"
    if is_bidirectional(config):
        return "has bidirectional attention"
    if _activation(config) not in ACTIVATIONS:
        return f"has the activation {_activation(config)}"
    for rope in ropes(config):
        if rope.get("rope_type", "default") not in ROPE_TYPES:
            return f"has rotary embeddings of type {rope['rope_type']}"
    if len(ropes(config)) > 1 and any(rope.get("rope_type") in ("yarn", "longrope") for rope in ropes(config)):
        return "scales the rotary embeddings of some layers"
    dim, rotated = head_dim(config), [rotated_numbers(config, rope) for rope in ropes(config)]
    if has_experts(config) and _activation(config) not in ("silu", "swish"):
        return f"has experts with the activation {_activation(config)}"
    if dim % 8 or dim > operators.MAX_DIM:
        return f"has heads of size {dim}"
    wrong = [count for count in rotated if count % 2 or not 0 < count <= dim]
    return f"rotates {wrong[0]} of {dim} numbers of each head" if wrong else ""


def is_bidirectional(config: Any) -> bool:
    """Whether tokens attend to later tokens, as in a Gemma 3 that embeds texts."""
    return bool(getattr(config, "use_bidirectional_attention", False))


def has_experts(config: Any) -> bool:
    """Whether layers of a model are mixtures of experts."""
    return bool(getattr(config, "num_experts", 0))


def experts_in(config: Any, layer: int) -> bool:
    """Whether a layer is a mixture of experts, by the rule of Qwen's mixtures."""
    if not has_experts(config) or layer in config.mlp_only_layers:
        return False
    return bool((layer + 1) % config.decoder_sparse_step == 0)


def head_dim(config: Any) -> int:
    """Return the numbers of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def activation(config: Any) -> str:
    """Return the activation of feed-forwards, by the kernels' names."""
    return ACTIVATIONS[_activation(config)]


def _activation(config: Any) -> str:
    return str(config.hidden_activation if hasattr(config, "hidden_activation") else config.hidden_act)


def ropes(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embedding, of each kind of layer where the kinds differ."""
    given = config.rope_parameters
    return [given[kind] for kind in _kinds(config)] or [given]


def rotated_numbers(config: Any, rope: dict[str, Any]) -> int:
    """Return how many numbers of a head rotate, the first ones, with one of ``ropes``."""
    partial = config.model_type == "phi3" or rope.get("rope_type", "default") != "default"  # as in transformers
    return int(head_dim(config) * (rope.get("partial_rotary_factor", 1.0) if partial else 1.0))


def rope_of(config: Any, layer: int) -> int | None:
    """Return which of ``ropes`` rotates queries and keys of a layer; None rotates nothing."""
    if config.model_type == "smollm3" and not config.no_rope_layers[layer]:
        return None
    kinds = _kinds(config)
    return kinds.index(config.layer_types[layer]) if kinds else 0


def _kinds(config: Any) -> list[str]:
    """Return the types of layers if each has a rotary embedding of its own."""
    return sorted(set(config.layer_types)) if "full_attention" in config.rope_parameters else []


def window_of(config: Any, layer: int) -> int | None:
    """Return how many tokens a layer attends to; None means all."""
    which = FAMILIES[config.model_type].window
    slides = which == "all" or (which == "by type" and config.layer_types[layer] == "sliding_attention")
    return config.sliding_window if slides and getattr(config, "use_sliding_window", True) else None


def score_scale(config: Any) -> float:
    """Return the factor of attention's scores."""
    if config.model_type == "granite":
        return float(config.attention_multiplier)
    if config.model_type in ("gemma2", "gemma3_text"):
        return float(config.query_pre_attn_scalar**-0.5)
    return float(head_dim(config) ** -0.5)


def multipliers(config: Any) -> Multipliers:
    """Return the multipliers and bounds of a model."""
    if config.model_type == "granite":
        return Multipliers(config.embedding_multiplier, config.residual_multiplier, 1.0 / config.logits_scaling)
    if config.model_type.startswith("gemma"):
        caps = [getattr(config, f"{name}_logit_softcapping", None) or 0.0 for name in ("attn", "final")]
        return Multipliers(config.hidden_size**0.5, attention_softcap=caps[0], logit_softcap=caps[1])
    return Multipliers()


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors of a model of a family."""
    hidden = config.hidden_size
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        found[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        parts = _attention_shapes(config) | _mlp_shapes(config, experts_in(config, layer))
        parts |= {f"{name}.weight": (hidden,) for name in FAMILIES[config.model_type].norms if name}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return found


def _attention_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    family, hidden, dim = FAMILIES[config.model_type], config.hidden_size, head_dim(config)
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    outputs = {"qkv": queries + 2 * keys} if family.joined else {"q": queries, "k": keys, "v": keys}
    found: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{part}_proj.weight": (count, hidden) for part, count in outputs.items()},
        "self_attn.o_proj.weight": (hidden, queries),
    }
    all_biases = family.biases == "by option" and getattr(config, "attention_bias", False)
    biased = {**outputs, "o": hidden} if all_biases else outputs if family.biases == "qkv" else {}
    found |= {f"self_attn.{part}_proj.bias": (count,) for part, count in biased.items()}
    if family.qk_norm != "none":
        each = family.qk_norm == "each"
        found["self_attn.q_norm.weight"] = (dim if each else queries,)
        found["self_attn.k_norm.weight"] = (dim if each else keys,)
    return found


def _mlp_shapes(config: Any, mixture: bool) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    if mixture:
        count, inner = config.num_experts, config.moe_intermediate_size
        return {
            "mlp.gate.weight": (count, hidden),
            "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
            "mlp.experts.down_proj": (count, hidden, inner),
        }
    inner = config.intermediate_size
    outputs = {"gate_up": 2 * inner} if FAMILIES[config.model_type].joined else {"gate": inner, "up": inner}
    found: dict[str, tuple[int, ...]] = {
        **{f"mlp.{part}_proj.weight": (count, hidden) for part, count in outputs.items()},
        "mlp.down_proj.weight": (hidden, inner),
    }
    if getattr(config, "mlp_bias", False):
        found |= {f"mlp.{part}_proj.bias": (count,) for part, count in {**outputs, "down": hidden}.items()}
    return found
