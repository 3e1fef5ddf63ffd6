"""A hand-written forward for the Llama family: Llama, Mistral, Qwen2 and Qwen3.

Projections of the same input are one product. Only rows with logits pass the last feed-forward. On a CPU the native
kernels run the whole forward in one call; other devices run the same operations in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cospec.core.interfaces import NativeForward
from cospec.errors import ModelError
from cospec.models.attention.backend import AttentionBackend, AttentionShape, LayerAttend
from cospec.models.attention.sdpa import SDPA
from cospec.models.cuda_graphs import CudaRecorder, GraphRunner
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache, LayerBlocks
from cospec.models.model_runner import Forwards
from cospec.models.shard import Shard, SumShards
from cospec.models.weights.format import LinearWeights, ReadWeight, WeightFormat
from cospec.native import operators

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # types whose frequencies do not depend on the length


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer; norms are float32. ``qkv`` joins the projections of one format."""

    input_norm: Tensor
    qkv: tuple[LinearWeights, ...]
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeights
    mlp_norm: Tensor
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """The weights of a model of the family, read from transformers' modules.

    Attributes:
        format: of linear weights that the file does not store in blocks.
        embedding: ``[V, hidden]``, also the output layer's weight if tied.
        frequencies: ``[D / 2]`` of the rotary embedding; ``rotary_scale`` multiplies cosines and sines.
    """

    format: WeightFormat
    layers: tuple[LayerWeights, ...]
    embedding: Tensor
    final_norm: Tensor
    head: LinearWeights
    frequencies: Tensor
    rotary_scale: float
    heads: int
    kv_heads: int
    dim: int
    eps: float
    scale: float


def why_not(config: Any) -> str:
    """Return why this forward cannot run a model, as an ending of "because it ..."; empty if supported."""
    kind = getattr(config, "model_type", "")
    if kind not in FAMILY:
        return f"is of type {kind}, not {', '.join(FAMILY)}"
    if config.hidden_act not in ("silu", "swish"):
        return f"has the activation {config.hidden_act}"
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in ROPE_TYPES:
        return f"has rotary embeddings of type {rope}"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "rotates a part of each head"
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return f"has heads of size {dim}" if dim % 8 or dim > operators.MAX_DIM else ""


def _linear(name: str, module: Any, read: ReadWeight) -> LinearWeights:
    return LinearWeights(read(name, module.weight), None if module.bias is None else module.bias.detach())


def _layer(name: str, layer: Any, config: Any, read: ReadWeight) -> LayerWeights:
    def linear(part: str) -> LinearWeights:
        return _linear(f"{name}.{part}", layer.get_submodule(part), read)

    attention = layer.self_attn
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (None if norm is None else norm.weight.detach().float() for norm in norms)
    window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach().float(),
        qkv=joined([linear(f"self_attn.{part}_proj") for part in "qkv"]),
        q_norm=q_norm,
        k_norm=k_norm,
        output=linear("self_attn.o_proj"),
        mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
        window=window,
    )


def joined(layers: Sequence[LinearWeights]) -> tuple[LinearWeights, ...]:
    """Join neighbours of the same format and the same use of a bias."""
    found: list[LinearWeights] = []
    for layer in layers:
        last = found[-1] if found else None
        same = last is not None and last.weight.format.name == layer.weight.format.name
        if last is not None and same and (last.bias is None) == (layer.bias is None):
            found[-1] = last.join(layer)
        else:
            found.append(layer)
    return tuple(found)


def read_weights(model: Any, format: WeightFormat, read: ReadWeight | None = None) -> LlamaWeights:
    """Read the weights of a loaded transformers model into a format; unchanged weights are not copied.

    Args:
        read: reads a linear weight by the name of its module; None reads the module's own weight.

    Raises:
        ModelError: the model is of another family, or needs an unsupported feature.
    """
    config, inner = model.config, model.model
    reason = why_not(config)
    if reason:
        raise ModelError(f"The fused forward cannot run the model {config.model_type} because it {reason}.")
    of_module: ReadWeight = read or (lambda _, weight: format.read(weight))
    rotary = inner.rotary_emb
    attention = inner.layers[0].self_attn
    return LlamaWeights(
        format=format,
        layers=tuple(
            _layer(f"model.layers.{number}", layer, config, of_module) for number, layer in enumerate(inner.layers)
        ),
        embedding=inner.embed_tokens.weight.detach(),
        final_norm=inner.norm.weight.detach().float(),
        head=_linear("lm_head", model.lm_head, of_module),
        frequencies=rotary.inv_freq.detach().float(),
        rotary_scale=float(rotary.attention_scaling),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=attention.head_dim,
        eps=config.rms_norm_eps,
        scale=float(attention.scaling),
    )


class Runner(Protocol):
    """An implementation of the forward."""

    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """Return float32 logits ``[R, V]``; write the batch's keys and values to the pages of each layer."""

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """Return logits like ``logits``, and the float32 states ``[R, hidden]`` before the output layer."""

    def on(self, cache: KVCache, max_len: int) -> NativeForward | None:
        """Return the native forward on one cache; None if the runner uses torch."""


class FusedLlama:
    """The forward of one model.

    Args:
        runner: the implementation in use.
        vocab_size: columns of the logits.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.runner = runner

    @classmethod
    def from_hf(
        cls, model: Any, cache: KVCache, format: WeightFormat, attention: AttentionBackend = SDPA
    ) -> FusedLlama:
        """Build from a loaded transformers model, which may be freed afterwards.

        Args:
            cache: the cache of the forward; the native forward needs contiguous float32 pages on the CPU.
            format: of the weights.
            attention: of a forward in torch.

        Raises:
            ModelError: the model is not of the family.
        """
        keys = cache.layers[0].keys
        plain = keys.device.type == "cpu" and keys.dtype == torch.float32 and keys.is_contiguous()
        in_place = plain and operators.available() and cache.pages.page_size % 8 == 0
        return cls.build(read_weights(model, format), attention, in_place)

    @classmethod
    def build(cls, weights: LlamaWeights, attention: AttentionBackend, in_place: bool) -> FusedLlama:
        """Build from weights on the device of the forward.

        Args:
            attention: of a forward in torch.
            in_place: whether the native forward can read the pages, see ``from_hf``.
        """
        vocab_size = weights.embedding.shape[0]
        if in_place:
            from cospec.native.llama_forward import NativeLlama

            return cls(NativeLlama(weights), vocab_size)
        runner = TorchRunner(weights, attention)
        graphs = weights.embedding.device.type == "cuda" and attention.capture_entries > 0
        return cls(GraphRunner(runner, CudaRecorder()) if graphs else runner, vocab_size)

    def forwards(self, cache: KVCache, max_len: int, keep_states: bool = False) -> Forwards:
        """Return the entry points on one cache, for sequences of up to ``max_len`` tokens."""
        return Forwards(
            score=lambda batch: self.logits(batch, cache.layers),
            read=(lambda batch: self.states(batch, cache.layers)) if keep_states else None,
            native_forward=self.runner.on(cache, max_len),
        )

    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """Return float32 logits ``[R, V]`` of the rows that request logits.

        Args:
            batch: on the device of the model.
            layers: ``KVCache.layers``, written after each sequence's start.
        """
        return self.runner.logits(batch, layers)

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """Return logits like ``logits``, and the float32 states ``[R, hidden]`` after the last norm."""
        return self.runner.states(batch, layers)


@dataclass(frozen=True, slots=True)
class StagePart:
    """How the layers of a stage differ from those of a whole model.

    Attributes:
        last: whether the stage has the model's last layer.
        sum: the sum over the shards of the stage; None for one shard.
    """

    last: bool = True
    sum: SumShards | None = None

    def add(self, x: Tensor, product: Tensor) -> Tensor:
        """Return ``x`` plus a shard's product, summed over the shards."""
        if self.sum is not None:
            total = product.float().cpu().contiguous()
            self.sum(total)
            product = total.to(product)
        return x + product


WHOLE = StagePart()


class _Decoded(NamedTuple):
    """A linear layer with the value of its weight."""

    format: WeightFormat
    value: Tensor
    bias: Tensor | None


class TorchRunner:
    """The same operations in torch, on any device, with any attention back end."""

    def __init__(self, weights: LlamaWeights, attention: AttentionBackend) -> None:
        self._weights, self.attention = weights, attention
        self._layers = tuple(
            (
                [self._decoded(part) for part in layer.qkv],
                self._decoded(layer.output),
                self._decoded(layer.gate.join(layer.up)),
                self._decoded(layer.down),
            )
            for layer in weights.layers
        )
        self._head = self._decoded(weights.head)

    def _decoded(self, linear: LinearWeights) -> _Decoded:
        """Return the value of the weight in the dtype of the states."""
        weight = linear.weight
        return _Decoded(weight.format, weight.decode(self._weights.embedding.dtype), linear.bias)

    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """See ``FusedLlama.logits``."""
        return self.run(batch, layers, self.attention.prepare(batch))

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """See ``FusedLlama.states``."""
        x = self._hidden(batch, layers, self.attention.prepare(batch))
        return self._product(x, self._head).float(), x.float()

    def on(self, cache: KVCache, max_len: int) -> None:
        """See ``Runner``."""

    def run(self, batch: InputBatch, layers: Sequence[LayerBlocks], attend: LayerAttend) -> Tensor:
        """Like ``logits``, with a prepared attention."""
        return self._product(self._hidden(batch, layers, attend), self._head).float()

    def head(self, x: Tensor) -> Tensor:
        """Return float32 logits ``[R, V]`` of states after the last layer."""
        return self._product(self._norm(x, self._weights.final_norm), self._head).float()

    @torch.no_grad()
    def _hidden(self, batch: InputBatch, layers: Sequence[LayerBlocks], attend: LayerAttend) -> Tensor:
        x = F.embedding(batch.ids, self._weights.embedding)
        return self._norm(self.run_layers(batch, x, layers, attend), self._weights.final_norm)

    def run_layers(
        self, batch: InputBatch, x: Tensor, layers: Sequence[LayerBlocks], attend: LayerAttend, stage: StagePart = WHOLE
    ) -> Tensor:
        """Return the states after the layers: of the rows with logits after the model's last layer, else of all rows.

        Args:
            x: states ``[T, hidden]`` before the layers.
        """
        w, add = self._weights, stage.add
        angles = batch.positions[:, None].float() * w.frequencies
        turn = (angles.cos() * w.rotary_scale)[:, None], (angles.sin() * w.rotary_scale)[:, None]
        for layer, (qkv, output, gate_up, down), pages in zip(w.layers, self._layers, layers, strict=True):
            normed = self._norm(x, layer.input_norm)
            states = torch.cat([self._product(normed, part) for part in qkv], -1).unflatten(-1, (-1, w.dim))
            q, k, v = states.split([w.heads, w.kv_heads, w.kv_heads], dim=1)
            q, k = (_rotate(self._norm(part, norm), turn) for part, norm in ((q, layer.q_norm), (k, layer.k_norm)))
            attended = attend(q, k, v, pages, AttentionShape(w.scale, layer.window)).flatten(1)
            if stage.last and layer is w.layers[-1]:
                x, attended = x[batch.logit_rows], attended[batch.logit_rows]
            x = add(x, self._product(attended, output))
            gate, up = self._product(self._norm(x, layer.mlp_norm), gate_up).chunk(2, dim=-1)
            x = add(x, self._product(F.silu(gate) * up, down))
        return x

    def _product(self, x: Tensor, linear: _Decoded) -> Tensor:
        """Multiply as ``WeightFormat.product``, with a weight that was decoded once."""
        return F.linear(linear.format.round_inputs(x), linear.value, linear.bias)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalise in float32 for every dtype of ``x``."""
        return x if weight is None else F.rms_norm(x.float(), weight.shape, weight, self._weights.eps).to(x.dtype)


class TorchStage:
    """The forward of a stage in torch, see ``stage.PackedStage``."""

    def __init__(
        self, weights: LlamaWeights, cache: KVCache, attention: AttentionBackend, shard: Shard, sum: SumShards | None
    ) -> None:
        self._runner, self._weights, self._cache = TorchRunner(weights, attention), weights, cache
        self._part = StagePart(shard.last, sum)

    def __call__(self, batch: InputBatch, states: Tensor | None) -> Tensor:
        """See ``stage.PackedStage``."""
        table, runner = self._weights.embedding, self._runner
        x = F.embedding(batch.ids, table) if states is None else states.to(table.dtype)
        x = runner.run_layers(batch, x, self._cache.layers, runner.attention.prepare(batch), self._part)
        return runner.head(x) if self._part.last else x


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding to ``[T, heads, D]``."""
    cos, sin = turn
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
