"""Packs the weights of the Llama family for the kernels.

Arrays have the names of the fields of ``LlamaConfig`` and, after ``layers.N.``, of ``LlamaLayer``. The facts are the
other fields of both structs, and kernel, outputs and inputs of each linear layer. The experts of a layer are one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cospec.models.files.array_file import ArrayMemory, PackedModel
from cospec.models.hf_logging import packing_progress
from cospec.models.llama_weights import DenseWeights, ExpertWeights, LayerWeights, LlamaWeights
from cospec.models.weights.format import LinearWeights, StoredWeight
from cospec.native.library import release_memory
from cospec.native.operators import add_linear, add_tensor, add_weights

TABLE_ROWS = 1024  # compared at once


def in_memory(weights: LlamaWeights) -> PackedModel:
    """Return the packed weights in memory."""
    memory = ArrayMemory()
    facts = pack(weights, memory)
    return PackedModel(facts, memory.arrays, frozenset(memory.kept))


def pack(weights: LlamaWeights, to: ArrayMemory) -> dict[str, Any]:
    """Pack weights, one layer at a time, and return the facts of the model."""
    packing = _Packing(to)
    table, kind = _table(weights)
    packing.tensor("embedding", table)  # first: it exists, so that it can be written while layers are packed
    packing.tensor("final_norm", weights.final_norm)
    packing.tensor("inverse_frequencies", weights.frequencies)
    layers = [packing.layer(number, layer) for number, layer in enumerate(packing_progress(weights.layers))]
    packing.linear("head", weights.head)
    factors = weights.factors
    config = {
        **packing.sizes,
        "num_layers": len(layers),
        "hidden": weights.embedding.shape[1],
        "heads": weights.heads,
        "kv_heads": weights.kv_heads,
        "dim": weights.dim,
        "rotated": 2 * weights.frequencies.shape[1],
        "num_tables": len(weights.frequencies),
        "wide_norms": int(packing.q_norms not in (0, weights.dim)),
        "gelu": int(weights.activation == "gelu_tanh"),
        "eps": weights.eps,
        "scale": weights.scale,
        "rotary_scale": weights.rotary_scale,
        "embedding_factor": factors.embedding,
        "residual_factor": factors.residual,
        "logit_factor": factors.logits,
        "attention_softcap": factors.attention_softcap,
        "logit_softcap": factors.logit_softcap,
    }
    return {
        "config": config,
        "embedding_kernel": kind,
        "vocab_size": weights.embedding.shape[0],
        "layers": layers,
        "linears": packing.linears,
        "experts": packing.experts,
    }


class _Packing:
    """Packs the parts of one model.

    Attributes:
        linears: kernel, outputs and inputs of each linear layer.
        experts: the same, and the number of experts.
        sizes: fields of ``LlamaConfig`` that say how large feed-forwards are.
        q_norms: numbers of the norm of queries, 0 without norm.
    """

    def __init__(self, to: ArrayMemory) -> None:
        self._to = to
        self.linears: dict[str, tuple[str, int, int]] = {}
        self.experts: dict[str, tuple[str, int, int, int]] = {}
        self.sizes = dict.fromkeys(
            ("intermediate", "num_experts", "experts_per_token", "expert_intermediate", "normalized_experts"), 0
        )
        self.q_norms = 0

    def tensor(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            add_tensor(self._to, name, tensor)

    def linear(self, name: str, linear: LinearWeights) -> None:
        weight = linear.weight
        add_linear(self._to, name, linear)
        self.linears[name] = (weight.format.kernel, weight.outputs, weight.inputs)

    def dense(self, place: str, dense: DenseWeights) -> None:
        self.linear(place + "gate_up", dense.gate.join(dense.up, rows=_interleave))
        self.linear(place + "down", dense.down)
        self.sizes["intermediate"] = dense.gate.weight.outputs

    def mixture(self, place: str, mixture: ExpertWeights) -> None:
        def gate_up(number: int) -> StoredWeight:
            gate, up = mixture.expert_gate_up(number)
            return gate.join([up], rows=_interleave)

        self.linear(place + "router", mixture.router)
        for name, of_expert in (("expert_gate_up", gate_up), ("expert_down", mixture.expert_down)):
            add_weights(self._to, place + name, of_expert, mixture.count)
            first = of_expert(0)
            self.experts[place + name] = (first.format.kernel, first.outputs, first.inputs, mixture.count)
        self.sizes |= {
            "num_experts": mixture.count,
            "experts_per_token": mixture.per_token,
            "expert_intermediate": mixture.down.inputs,
            "normalized_experts": int(mixture.normalized),
        }

    def layer(self, number: int, layer: LayerWeights) -> dict[str, int]:
        """Pack a layer, and return the fields of ``LlamaLayer`` that are numbers."""
        place = f"layers.{number}."
        for name in ("attention_norm", "mlp_norm", "after_attention", "after_mlp", "q_norm", "k_norm"):
            self.tensor(place + name, getattr(layer, name))
        for name, projection in zip("qkv", layer.qkv, strict=False):  # projections of one format are joined
            self.linear(place + name, projection)
        self.linear(place + "output", layer.output)
        if layer.dense is not None:
            self.dense(place, layer.dense)
        if layer.experts is not None:
            self.mixture(place, layer.experts)
        self.q_norms = 0 if layer.q_norm is None else layer.q_norm.shape[0]
        release_memory()  # of joined parts; the peak counts when weights are loaded
        return {"window": layer.window or 0, "rotary": -1 if layer.rotary is None else layer.rotary}


def _table(weights: LlamaWeights) -> tuple[Tensor, str]:
    """Return the embedding table and the name of its kernel: file blocks, or 16 bits where no value changes."""
    if weights.table is not None:
        return weights.table.parts[0], weights.table.format.kernel
    table = weights.embedding
    for dtype, kernel in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if table.dtype is dtype:  # often mapped from the file, so that no copy is in memory
            return table, kernel
    for dtype, kernel in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        half = table.to(dtype)
        if weights.format.table_dtype is dtype or _same_values(half, table):  # half the size at no loss
            return half, kernel
    return table.float(), "fp32"


def _same_values(half: Tensor, table: Tensor) -> bool:
    """Whether two tables have the same values; few rows at a time become float32."""
    parts = zip(half.split(TABLE_ROWS), table.split(TABLE_ROWS), strict=True)
    return all(torch.equal(one.float(), other.float()) for one, other in parts)


def _interleave(gate_and_up: Sequence[Tensor]) -> Tensor:
    """Rows in turns of 32 gates and their 32 inputs, then zeros; ``[F, ...]`` twice to ``[2 F', ...]``."""
    missing = -gate_and_up[0].shape[0] % 32
    padded = [torch.cat([x, x.new_zeros(missing, *x.shape[1:])]).unflatten(0, (-1, 32)) for x in gate_and_up]
    return torch.stack(padded, 1).flatten(0, 2)
