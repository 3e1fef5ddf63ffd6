"""A hand-written forward for the families of Llama, see ``families``.

Projections of the same input are one product. Only rows with logits pass the last feed-forward. On a CPU the native
kernels run the whole forward in one call; other devices run the same operations in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cospec.core.interfaces import NativeForward
from cospec.errors import ModelError
from cospec.models.attention.backend import AttentionBackend, AttentionShape, LayerAttend
from cospec.models.attention.sdpa import SDPA
from cospec.models.cuda_graphs import CudaRecorder, GraphRunner
from cospec.models.files.array_file import PackedModel
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache, LayerBlocks
from cospec.models.llama_weights import LlamaWeights, read_weights, tensors_of
from cospec.models.model_runner import Forwards
from cospec.models.pointwise import Rotation, pointwise_on
from cospec.models.shard import Shard, SumShards
from cospec.models.weights.format import LinearWeights, WeightFormat
from cospec.native import operators


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
            cache: the cache of the forward; the native forward needs contiguous pages on the CPU.
            format: of the weights.
            attention: of a forward in torch.

        Raises:
            ModelError: the model is not of the family.
        """
        keys = cache.layers[0].keys
        plain = keys.device.type == "cpu" and keys.is_contiguous()
        in_place = plain and operators.available() and cache.pages.page_size % 8 == 0
        return cls.build(read_weights(model.config, tensors_of(model), format), attention, in_place)

    @classmethod
    def build(cls, weights: LlamaWeights, attention: AttentionBackend, in_place: bool) -> FusedLlama:
        """Build from weights on the device of the forward.

        Args:
            attention: of a forward in torch.
            in_place: whether the native forward can read the pages, see ``from_hf``.
        """
        vocab_size = weights.embedding.shape[0]
        if in_place:
            from cospec.native.llama_weight_packing import in_memory

            return cls.packed(in_memory(weights))
        runner = TorchRunner(weights, attention)
        graphs = weights.embedding.device.type == "cuda" and attention.capture_entries > 0
        return cls(GraphRunner(runner, CudaRecorder()) if graphs else runner, vocab_size)

    @classmethod
    def packed(cls, model: PackedModel) -> FusedLlama:
        """Build the native forward from packed weights."""
        from cospec.native.llama_forward import NativeLlama

        runner = NativeLlama(model)
        return cls(runner, runner.vocab_size)

    def forwards(self, cache: KVCache, max_len: int, keep_hidden_states: bool = False) -> Forwards:
        """Return the entry points on one cache, for sequences of up to ``max_len`` tokens."""
        return Forwards(
            score=lambda batch: self.logits(batch, cache.layers),
            read=(lambda batch: self.states(batch, cache.layers)) if keep_hidden_states else None,
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

    def total(self, product: Tensor) -> Tensor:
        """Return the sum of a product over the shards."""
        if self.sum is None:
            return product
        total = product.float().cpu().contiguous()
        self.sum(total)
        return total.to(product)


WHOLE = StagePart()


class _Decoded(NamedTuple):
    """A linear layer with the value of its weight."""

    format: WeightFormat
    order: Tensor | None
    value: Tensor
    bias: Tensor | None

    def product(self, x: Tensor) -> Tensor:
        """Multiply as ``WeightFormat.product``, with a weight that was decoded once."""
        return F.linear(self.format.round_in_order(x, self.order), self.value, self.bias)


class TorchRunner:
    """The same operations in torch, on any device, with any attention back end."""

    def __init__(self, weights: LlamaWeights, attention: AttentionBackend) -> None:
        weights = replace(weights, layers=tuple(weights.layers))
        dense = [layer.dense for layer in weights.layers if layer.dense is not None]
        if len(dense) < len(weights.layers):
            raise ModelError("The fused forward in torch cannot run a mixture of experts.")
        self._weights, self.attention = weights, attention
        self._pointwise = pointwise_on(weights.embedding.device)
        self._layers = tuple(
            (
                [self._decoded(part) for part in layer.qkv],
                self._decoded(layer.output),
                self._decoded(own.gate.join(own.up)),
                self._decoded(own.down),
            )
            for layer, own in zip(weights.layers, dense, strict=True)
        )
        # The joined gates are copies, so the weights of the feed-forwards can go.
        weights = self._weights = replace(weights, layers=tuple(replace(each, dense=None) for each in weights.layers))
        self._head = self._decoded(weights.head)
        table = weights.table
        self._embedding = weights.embedding if table is None else table.decode(weights.embedding.dtype)

    def _decoded(self, linear: LinearWeights) -> _Decoded:
        """Return the value of the weight in the dtype of the states."""
        weight = linear.weight
        return _Decoded(weight.format, weight.order, weight.decode(self._weights.embedding.dtype), linear.bias)

    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """See ``FusedLlama.logits``."""
        return self.run(batch, layers, self.attention.prepare(batch))

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """See ``FusedLlama.states``."""
        x = self._hidden(batch, layers, self.attention.prepare(batch))
        return self._logits(x), x.float()

    def on(self, cache: KVCache, max_len: int) -> None:
        """See ``Runner``."""

    def run(self, batch: InputBatch, layers: Sequence[LayerBlocks], attend: LayerAttend) -> Tensor:
        """Like ``logits``, with a prepared attention."""
        return self._logits(self._hidden(batch, layers, attend))

    def _logits(self, x: Tensor) -> Tensor:
        factors = self._weights.factors
        logits = self._head.product(x).float()
        if factors.logits != 1.0:
            logits = logits * factors.logits
        cap = factors.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def head(self, x: Tensor) -> Tensor:
        """Return float32 logits ``[R, V]`` of states after the last layer."""
        return self._logits(self._norm(x, self._weights.final_norm))

    def embed(self, ids: Tensor) -> Tensor:
        """Return states ``[T, hidden]`` before the first layer."""
        x, factor = F.embedding(ids, self._embedding), self._weights.factors.embedding
        return x if factor == 1.0 else x * factor

    @torch.no_grad()
    def _hidden(self, batch: InputBatch, layers: Sequence[LayerBlocks], attend: LayerAttend) -> Tensor:
        x = self.run_layers(batch, self.embed(batch.ids), layers, attend)
        return self._norm(x, self._weights.final_norm)

    def run_layers(
        self, batch: InputBatch, x: Tensor, layers: Sequence[LayerBlocks], attend: LayerAttend, stage: StagePart = WHOLE
    ) -> Tensor:
        """Return the states after the layers: of the rows with logits after the model's last layer, else of all rows.

        Args:
            x: states ``[T, hidden]`` before the layers.
        """
        w = self._weights
        turns = [self._turn(batch, frequencies) for frequencies in w.frequencies]
        for layer, (qkv, output, gate_up, down), pages in zip(w.layers, self._layers, layers, strict=True):
            normed = self._norm(x, layer.attention_norm)
            parts = [part.product(normed) for part in qkv]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            q, k, v = joined.split([w.heads * w.dim, w.kv_heads * w.dim, w.kv_heads * w.dim], dim=-1)
            turn = None if layer.rotary is None else turns[layer.rotary]
            q, k = (self._heads(part, norm, turn) for part, norm in ((q, layer.q_norm), (k, layer.k_norm)))
            shape = AttentionShape(w.scale, layer.window, w.factors.attention_softcap or None)
            attended = attend(q, k, v.unflatten(-1, (-1, w.dim)), pages, shape).flatten(1)
            if stage.last and layer is w.layers[-1]:
                x, attended = x[batch.logit_rows], attended[batch.logit_rows]
            branch = self._branch(stage.total(output.product(attended)), layer.after_attention)
            x, normed = self._add_norm(x, branch, layer.mlp_norm)
            fed = down.product(self._pointwise.gate(gate_up.product(normed), w.activation))
            x = x + self._branch(stage.total(fed), layer.after_mlp)
        return x

    def _turn(self, batch: InputBatch, frequencies: Tensor) -> Rotation:
        """Return cosines and sines ``[T, R / 2]``."""
        angles, scale = batch.positions[:, None].float() * frequencies, self._weights.rotary_scale
        return angles.cos() * scale, angles.sin() * scale

    def _heads(self, x: Tensor, norm: Tensor | None, turn: Rotation | None) -> Tensor:
        """Normalise, divide into heads ``[T, heads, D]`` and rotate; a wide norm spans all heads."""
        dim = self._weights.dim
        if norm is not None and norm.shape[0] != dim:
            x, norm = self._norm(x, norm), None
        return self._pointwise.heads(x.unflatten(-1, (-1, dim)), norm, turn, self._weights.eps)

    def _branch(self, branch: Tensor, norm: Tensor | None) -> Tensor:
        """Return what the output of attention or feed-forward adds to the states."""
        branch, factor = self._norm(branch, norm), self._weights.factors.residual
        return branch if factor == 1.0 else branch * factor

    def _add_norm(self, x: Tensor, branch: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum, and the normalised sum."""
        if weight is None:
            x = x + branch
            return x, x
        return self._pointwise.add_norm(x, branch, weight, self._weights.eps)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalise in float32 for every dtype of ``x``."""
        return x if weight is None else self._pointwise.norm(x, weight, self._weights.eps)


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
        x = runner.embed(batch.ids) if states is None else states.to(table.dtype)
        x = runner.run_layers(batch, x, self._cache.layers, runner.attention.prepare(batch), self._part)
        return runner.head(x) if self._part.last else x
