"""Weights of the families of Llama, read from tensors by transformers' names.

One forward serves all families, see ``families``. Linear weights become the format of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from cospec.errors import ModelError
from cospec.models.families import (
    FAMILIES,
    Multipliers,
    activation,
    experts_in,
    head_dim,
    multipliers,
    rope_of,
    ropes,
    rotated_numbers,
    score_scale,
    why_not,
    window_of,
)
from cospec.models.files.source import EMBEDDING, HEAD
from cospec.models.rotary import frequencies
from cospec.models.shard import Shard
from cospec.models.weights.format import LinearWeights, ReadWeight, StoredWeight, WeightFormat
from cospec.registry import WEIGHT_FORMATS


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

    def __init__(self, config: Any, tensors: Mapping[str, Tensor], read: ReadWeight) -> None:
        self._config, self._tensors, self._read = config, tensors, read
        self._family = FAMILIES[config.model_type]
        self._windows = [window_of(config, layer) for layer in range(len(self))]
        self._ropes = [rope_of(config, layer) for layer in range(len(self))]

    def __len__(self) -> int:
        return int(self._config.num_hidden_layers)

    @overload
    def __getitem__(self, number: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, number: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        numbers = range(len(self))[number]
        if isinstance(numbers, range):
            return [self.layer(each) for each in numbers]
        return self.layer(numbers)

    def norm(self, name: str) -> Tensor:
        """Return the weight of a norm."""
        weight = self._tensors[f"{name}.weight"].detach().float()
        return weight + self._family.norm_offset if self._family.norm_offset else weight

    def linear(self, name: str) -> LinearWeights:
        """Return a linear layer."""
        bias = self._tensors.get(f"{name}.bias")
        return LinearWeights(self._read(name, self._tensors[f"{name}.weight"]), None if bias is None else bias.detach())

    def layer(self, number: int) -> LayerWeights:
        """Return layer ``number``."""
        place, family, config = f"model.layers.{number}.", self._family, self._config
        before, mlp, after, after_mlp = (self.norm(place + name) if name else None for name in family.norms)
        q_norm, k_norm = (
            self.norm(f"{place}self_attn.{part}_norm") if family.qk_norm != "none" else None for part in "qk"
        )
        inputs, mixture = ["qkv"] if family.joined else ["q", "k", "v"], experts_in(config, number)
        return LayerWeights(
            attention_norm=before,
            mlp_norm=mlp,
            after_attention=after,
            after_mlp=after_mlp,
            qkv=joined([self.linear(f"{place}self_attn.{part}_proj") for part in inputs]),
            q_norm=q_norm,
            k_norm=k_norm,
            output=self.linear(place + "self_attn.o_proj"),
            dense=None if mixture else self._dense(place + "mlp."),
            experts=self._experts(place + "mlp.") if mixture else None,
            window=self._windows[number],
            rotary=self._ropes[number],
        )

    def _dense(self, place: str) -> DenseWeights:
        if self._family.joined:
            gate, up = halves(self.linear(place + "gate_up_proj"))
        else:
            gate, up = self.linear(place + "gate_proj"), self.linear(place + "up_proj")
        return DenseWeights(gate, up, self.linear(place + "down_proj"))

    def _experts(self, place: str) -> ExpertWeights:
        # The choice of experts is not rounded: a small difference of probabilities would change the experts.
        gate = self._tensors[place + "gate.weight"].detach().float()
        router = LinearWeights(WEIGHT_FORMATS.load("fp32")().read(gate), None)
        names = (f"{place}experts.{part}_proj" for part in ("gate_up", "down"))
        gate_up, down = (self._read(name, self._tensors[name]) for name in names)
        config = self._config
        return ExpertWeights(router, gate_up, down, config.num_experts_per_tok, bool(config.norm_topk_prob))


def halves(linear: LinearWeights) -> tuple[LinearWeights, LinearWeights]:
    """Cut a linear layer into the first and the second half of its outputs."""
    weight, middle = linear.weight, linear.weight.outputs // 2
    first, second = weight.some_outputs(0, middle), weight.some_outputs(middle, middle)
    if linear.bias is None:
        return LinearWeights(first, None), LinearWeights(second, None)
    return LinearWeights(first, linear.bias[:middle]), LinearWeights(second, linear.bias[middle:])


def read_weights(
    config: Any,
    tensors: Mapping[str, Tensor],
    format: WeightFormat,
    read: ReadWeight | None = None,
    table: StoredWeight | None = None,
    shard: Shard = Shard(),
) -> LlamaWeights:
    """Read the weights of a model into a format; unchanged weights are not copied.

    Args:
        config: of the model, or of the part.
        tensors: those of ``families.tensor_shapes``, in any floating dtype. Weights that ``read`` reads elsewhere may
            be placeholders. An output layer counts in a tied model too.
        shard: the part that the model is. One row stands for an embedding or an output layer that no forward reads.
        read: reads a linear weight by the name of its module; None reads the tensor.
        table: the embedding in blocks, instead of the tensor.

    Raises:
        ModelError: the model is of another family, or needs an unsupported feature.
        Exception: the configuration lacks values, or has values that make no sense.
    """
    reason = why_not(config)
    if reason:
        raise ModelError(f"The fused forward cannot run the model {config.model_type} because it {reason}.")
    read = read or (lambda _, weight: format.read(weight.flatten(0, -2)))
    layers = _Layers(config, tensors, read)
    embedding = tensors[EMBEDDING].detach()
    own = tensors.get(HEAD, embedding)
    head = read(HEAD.removesuffix(".weight"), own) if shard.last else format.read(embedding[:1])
    tables, rotary_scale = _frequencies(config)
    return LlamaWeights(
        format=format,
        layers=layers,
        embedding=embedding if shard.first else embedding[:1].clone(),
        table=table,
        final_norm=layers.norm("model.norm"),
        head=LinearWeights(head, None),
        frequencies=tables.to(embedding.device),
        rotary_scale=rotary_scale,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=head_dim(config),
        eps=config.rms_norm_eps,
        scale=score_scale(config),
        activation=activation(config),
        factors=multipliers(config),
    )


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a transformers model by their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _frequencies(config: Any) -> tuple[Tensor, float]:
    """Return ``[tables, R / 2]`` and the scale of cosines and sines."""
    positions = config.max_position_embeddings
    try:
        found = [frequencies(rope, rotated_numbers(config, rope), positions) for rope in ropes(config)]
    except KeyError as error:
        raise ModelError(f"The rotary embeddings of the model lack {error}.") from None
    return torch.stack([table for table, _ in found]), found[0][1]
