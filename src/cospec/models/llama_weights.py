"""Weights of the families of Llama, read from transformers' modules.

One forward serves all families. A family differs in its norms, in factors and bounds, and in which positions rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from cospec.errors import ModelError
from cospec.models.shard import Shard
from cospec.models.weights.format import LinearWeights, ReadWeight, StoredWeight, WeightFormat
from cospec.native import operators
from cospec.registry import WEIGHT_FORMATS

# Types whose frequencies do not depend on the length. `long_rope` chooses those of a long-rope model at load. Dynamic
# frequencies change beyond the positions of the model, which bound its sequences.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family's modules have their norms and windows.

    Attributes:
        norms: attributes of a layer: before attention, before the feed-forward, after each of the two; empty: none.
        norm_offset: added to the weights of norms.
        window: attribute of the configuration that is the window of all layers; empty: attention modules have it.
    """

    norms: tuple[str, str, str, str] = ("input_layernorm", "post_attention_layernorm", "", "")
    norm_offset: float = 0.0
    window: str = ""


_AROUND = ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window="sliding_window"),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "granite": Family(),
    "smollm3": Family(),
    "phi3": Family(window="sliding_window"),
    "olmo2": Family(("", "", "post_attention_layernorm", "post_feedforward_layernorm")),
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(_AROUND, norm_offset=1.0),
    "gemma3_text": Family(_AROUND, norm_offset=1.0),
}
"""Families by transformers' ``model_type``."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    """A feed-forward: ``down(activation(gate(x)) * up(x))``."""

    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """A mixture of E feed-forwards, the experts; each has weights of its own of I intermediate numbers.

    Attributes:
        router: ``[E, hidden]``.
        gate_up: ``[E * 2 I, hidden]``, the gates of an expert before its inputs.
        down: ``[E * hidden, I]``.
        per_token: experts of a token, those of the largest probabilities.
        normalized: whether the probabilities of a token's experts are divided by their sum.
    """

    router: LinearWeights
    gate_up: StoredWeight
    down: StoredWeight
    per_token: int
    normalized: bool

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.router.weight.outputs

    def expert_gate_up(self, number: int) -> tuple[StoredWeight, StoredWeight]:
        """Return gate and input of an expert."""
        size = self.gate_up.outputs // self.count // 2
        first = 2 * number * size
        return self.gate_up.some_outputs(first, size), self.gate_up.some_outputs(first + size, size)

    def expert_down(self, number: int) -> StoredWeight:
        """Return the second product of an expert."""
        size = self.down.outputs // self.count
        return self.down.some_outputs(number * size, size)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer; norms are float32, and None where the family has none.

    Attributes:
        attention_norm, mlp_norm: of the inputs; ``after_attention`` and ``after_mlp`` are of the outputs.
        qkv: joins the projections of one format.
        q_norm, k_norm: ``[D]`` of each head, or of all heads together.
        dense, experts: the feed-forward is one of the two.
        rotary: which of the model's frequencies rotate queries and keys; None rotates nothing.
    """

    attention_norm: Tensor | None
    mlp_norm: Tensor | None
    after_attention: Tensor | None
    after_mlp: Tensor | None
    qkv: tuple[LinearWeights, ...]
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeights
    dense: DenseWeights | None
    experts: ExpertWeights | None
    window: int | None
    rotary: int | None


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Multipliers and bounds of a family.

    Attributes:
        embedding, residual, logits: multiply embeddings, the outputs of attention and feed-forward, and logits.
        attention_softcap, logit_softcap: ``cap * tanh(x / cap)`` bounds scores and logits; 0 does not.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """The weights of a model.

    Attributes:
        format: of linear weights that the file does not store in blocks.
        layers: a layer is read when it is taken, so that a forward which packs weights holds one layer at a time.
        embedding: ``[V, hidden]``, also the output layer's weight if tied; a placeholder if ``table`` has the blocks.
        table: the embedding in blocks, or None.
        frequencies: ``[tables, R / 2]`` of the rotary embedding of the first R numbers of a head; ``rotary_scale``
            multiplies cosines and sines.
        activation: ``silu`` or ``gelu_tanh``.
    """

    format: WeightFormat
    layers: Sequence[LayerWeights]
    embedding: Tensor
    table: StoredWeight | None
    final_norm: Tensor
    head: LinearWeights
    frequencies: Tensor
    rotary_scale: float
    heads: int
    kv_heads: int
    dim: int
    eps: float
    scale: float
    activation: str
    factors: Multipliers


def why_not(config: Any) -> str:
    """Return why this forward cannot run a model, as an ending of "because it ..."; empty if supported."""
    kind = getattr(config, "model_type", "")
    if kind not in FAMILIES:
        return f"is of type {kind}, not {', '.join(FAMILIES)}"
    if _activation(config) not in ACTIVATIONS:
        return f"has the activation {_activation(config)}"
    for rope in _ropes(config):
        if rope.get("rope_type", "default") not in ROPE_TYPES:
            return f"has rotary embeddings of type {rope['rope_type']}"
    if len(_ropes(config)) > 1 and any(rope.get("rope_type") in ("yarn", "longrope") for rope in _ropes(config)):
        return "scales the rotary embeddings of some layers"
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(dim * _ropes(config)[0].get("partial_rotary_factor", 1.0))
    if has_experts(config) and _activation(config) not in ("silu", "swish"):
        return f"has experts with the activation {_activation(config)}"
    if dim % 8 or dim > operators.MAX_DIM:
        return f"has heads of size {dim}"
    return f"rotates {rotated} of {dim} numbers of each head" if rotated % 2 or not 0 < rotated <= dim else ""


def has_experts(config: Any) -> bool:
    """Whether layers of a model are mixtures of experts."""
    return bool(getattr(config, "num_experts", 0))


def _activation(config: Any) -> str:
    return str(config.hidden_activation if hasattr(config, "hidden_activation") else config.hidden_act)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embedding, of each kind of layer where the kinds differ."""
    given = config.rope_parameters
    return [given[kind] for kind in sorted(set(config.layer_types))] if "full_attention" in given else [given]


def joined(layers: Sequence[LinearWeights]) -> tuple[LinearWeights, ...]:
    """Join neighbours of the same format, order of inputs and use of a bias."""
    found: list[LinearWeights] = []
    for layer in layers:
        last = found[-1] if found else None
        if last is not None and last.weight.joins(layer.weight) and (last.bias is None) == (layer.bias is None):
            found[-1] = last.join(layer)
        else:
            found.append(layer)
    return tuple(found)


class _Layers(Sequence[LayerWeights]):
    """Reads the layers of one model, each when it is taken."""

    def __init__(self, model: Any, read: ReadWeight) -> None:
        self._config, self._read, self._layers = model.config, read, model.model.layers
        self.family = FAMILIES[model.config.model_type]

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, number: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, number: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        numbers = range(len(self))[number]
        if isinstance(numbers, range):
            return [self.layer(each) for each in numbers]
        return self.layer(numbers)

    def norm(self, module: Any) -> Tensor:
        """Return the weight of a norm."""
        weight: Tensor = module.weight.detach().float()
        return weight + self.family.norm_offset if self.family.norm_offset else weight

    def linear(self, name: str, module: Any) -> LinearWeights:
        """Return a linear layer."""
        return LinearWeights(self._read(name, module.weight), None if module.bias is None else module.bias.detach())

    def layer(self, number: int) -> LayerWeights:
        """Return layer ``number``."""
        layer = self._layers[number]
        attention, config = layer.self_attn, self._config
        before, mlp, after, after_mlp = (
            self.norm(layer.get_submodule(name)) if name else None for name in self.family.norms
        )

        def linear(part: str) -> LinearWeights:
            return self.linear(f"model.layers.{number}.{part}", layer.get_submodule(part))

        parts = ["self_attn.qkv_proj"] if config.model_type == "phi3" else [f"self_attn.{part}_proj" for part in "qkv"]
        normed = hasattr(attention, "q_norm")
        window = config.sliding_window if self.family.window else getattr(attention, "sliding_window", None)
        return LayerWeights(
            attention_norm=before,
            mlp_norm=mlp,
            after_attention=after,
            after_mlp=after_mlp,
            qkv=joined([linear(part) for part in parts]),
            q_norm=self.norm(attention.q_norm) if normed else None,
            k_norm=self.norm(attention.k_norm) if normed else None,
            output=linear("self_attn.o_proj"),
            dense=self._dense(linear) if not hasattr(layer.mlp, "experts") else None,
            experts=self._experts(number) if hasattr(layer.mlp, "experts") else None,
            window=window,
            rotary=self._rotary(number),
        )

    def _dense(self, linear: Callable[[str], LinearWeights]) -> DenseWeights:
        if self._config.model_type == "phi3":
            gate, up = halves(linear("mlp.gate_up_proj"))
        else:
            gate, up = linear("mlp.gate_proj"), linear("mlp.up_proj")
        return DenseWeights(gate, up, linear("mlp.down_proj"))

    def _experts(self, number: int) -> ExpertWeights:
        place, config = f"model.layers.{number}.mlp", self._config
        mixture = self._layers[number].mlp
        # The choice of experts is not rounded: a small difference of probabilities would change the experts.
        router = LinearWeights(WEIGHT_FORMATS.load("fp32")().read(mixture.gate.weight.detach().float()), None)
        gate_up, down = (
            self._read(f"{place}.experts.{part}_proj", getattr(mixture.experts, f"{part}_proj"))
            for part in ("gate_up", "down")
        )
        return ExpertWeights(router, gate_up, down, config.num_experts_per_tok, bool(config.norm_topk_prob))

    def _rotary(self, number: int) -> int | None:
        config = self._config
        if config.model_type == "smollm3" and not config.no_rope_layers[number]:
            return None
        kinds = sorted(set(config.layer_types)) if "full_attention" in config.rope_parameters else []
        return kinds.index(config.layer_types[number]) if kinds else 0


def halves(linear: LinearWeights) -> tuple[LinearWeights, LinearWeights]:
    """Cut a linear layer into the first and the second half of its outputs."""
    weight, middle = linear.weight, linear.weight.outputs // 2
    first, second = weight.some_outputs(0, middle), weight.some_outputs(middle, middle)
    if linear.bias is None:
        return LinearWeights(first, None), LinearWeights(second, None)
    return LinearWeights(first, linear.bias[:middle]), LinearWeights(second, linear.bias[middle:])


def read_weights(
    model: Any,
    format: WeightFormat,
    read: ReadWeight | None = None,
    table: StoredWeight | None = None,
    shard: Shard = Shard(),
) -> LlamaWeights:
    """Read the weights of a loaded transformers model into a format; unchanged weights are not copied.

    Args:
        shard: the part that the model is. One row stands for an embedding or an output layer that no forward reads.
        read: reads a linear weight by the name of its module; None reads the module's own weight.
        table: the embedding in blocks, instead of the module's.

    Raises:
        ModelError: the model is of another family, or needs an unsupported feature.
    """
    config, inner = model.config, model.model
    reason = why_not(config)
    if reason:
        raise ModelError(f"The fused forward cannot run the model {config.model_type} because it {reason}.")
    layers = _Layers(model, read or (lambda _, weight: format.read(weight.flatten(0, -2))))
    attention = inner.layers[0].self_attn
    frequencies, rotary_scale = _frequencies(config, inner.rotary_emb)
    embedding = inner.embed_tokens.weight.detach()
    unread = LinearWeights(format.read(embedding[:1]), None)
    return LlamaWeights(
        format=format,
        layers=layers,
        embedding=embedding if shard.first else embedding[:1].clone(),
        table=table,
        final_norm=layers.norm(inner.norm),
        head=layers.linear("lm_head", model.lm_head) if shard.last else unread,
        frequencies=frequencies,
        rotary_scale=rotary_scale,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=attention.head_dim,
        eps=config.rms_norm_eps,
        scale=float(attention.scaling),
        activation=ACTIVATIONS[_activation(config)],
        factors=_factors(config),
    )


def _frequencies(config: Any, rotary: Any) -> tuple[Tensor, float]:
    """Return ``[tables, R / 2]`` and the scale of cosines and sines."""
    if "full_attention" not in config.rope_parameters:
        return rotary.inv_freq.detach().float()[None], float(rotary.attention_scaling)
    kinds = sorted(set(config.layer_types))
    tables = [getattr(rotary, f"{kind}_inv_freq").detach().float() for kind in kinds]
    return torch.stack(tables), float(getattr(rotary, f"{kinds[0]}_attention_scaling"))


def _factors(config: Any) -> Multipliers:
    if config.model_type == "granite":
        return Multipliers(config.embedding_multiplier, config.residual_multiplier, 1.0 / config.logits_scaling)
    if config.model_type.startswith("gemma"):
        caps = [getattr(config, f"{name}_logit_softcapping", None) or 0.0 for name in ("attn", "final")]
        return Multipliers(config.hidden_size**0.5, attention_softcap=caps[0], logit_softcap=caps[1])
    return Multipliers()
