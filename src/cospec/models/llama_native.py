"""The Llama family's forward as one call into the native kernels: the structs they share, and what fills them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_long, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cospec.batches import Pick, Rolled
from cospec.models import native
from cospec.models.cache import LayerPages
from cospec.models.llama import Affine, LayerWeights, Weights
from cospec.models.native import Kind, PackedLinear
from cospec.models.packed import PackedBatch


class _LayerSpec(Structure):
    """``LlamaLayer`` in ``csrc/llama.h``."""

    _fields_ = [
        *[(name, c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")],
        *[(name, c_void_p) for name in ("qkv", "output", "gate_up", "down")],
        ("window", c_long),
    ]


class _Spec(Structure):
    """``LlamaSpec`` in ``csrc/llama.h``."""

    _fields_ = [
        ("layer", POINTER(_LayerSpec)),
        *[(name, c_void_p) for name in ("embedding", "final_norm", "head", "frequencies")],
        *[(name, c_long) for name in ("embedding_kind", "layers", "hidden", "heads", "kv_heads", "dim", "inner")],
        *[(name, c_float) for name in ("eps", "scale", "rotary_scale")],
    ]


class _Batch(Structure):
    """``Batch`` in ``csrc/llama.h``."""

    _fields_ = [
        *[(name, c_void_p) for name in ("ids", "positions", "row_segment", "visible", "mask", "tables", "starts")],
        *[(name, c_void_p) for name in ("write_at", "wanted", "k_pages", "v_pages")],
        *[(name, c_long) for name in ("rows", "segments", "wanted_rows", "page_size", "table_width")],
    ]


class _Rollout(Structure):
    """``Rollout`` in ``csrc/llama.h``."""

    _fields_ = [
        *[(name, c_void_p) for name in ("temperatures", "streams", "depths")],
        ("depth", c_long),
        ("logits", c_void_p),
        ("step_logits", c_long),
        *[(name, c_void_p) for name in ("q", "tokens", "confidence")],
    ]


class NativeRunner:
    """The whole forward as one call into the kernels."""

    def __init__(self, weights: Weights, kind: Kind) -> None:
        self._kept: list[Any] = []  # what the library points to
        self._vocab_size, self._hidden = weights.embedding.shape
        self._pointers = c_void_p * len(weights.layers)
        layers = (_LayerSpec * len(weights.layers))(*(self._layer(layer, kind) for layer in weights.layers))
        table = weights.embedding.float()
        half = table.bfloat16()
        if kind == "bf16" or torch.equal(half.float(), table):  # half the size at no loss
            table = half
        spec = _Spec(
            layers, self._tensor(table), self._tensor(weights.final_norm), self._linear(weights.head, kind),
            self._tensor(weights.frequencies), native.KINDS["bf16" if table is half else "fp32"],
            len(layers), self._hidden, weights.heads, weights.kv_heads, weights.dim, weights.layers[0].gate[0].shape[0],
            weights.eps, weights.scale, weights.rotary_scale,
        )  # fmt: skip
        library = native.library()
        new, free, self._run = library.cospec_llama_new, library.cospec_llama_free, library.cospec_llama
        new.argtypes, new.restype = [POINTER(_Spec)], c_void_p
        free.argtypes, free.restype = [c_void_p], None
        self._run.argtypes, self._run.restype = [c_void_p, POINTER(_Batch), c_void_p], None
        self._read = library.cospec_llama_states
        self._read.argtypes, self._read.restype = [c_void_p, POINTER(_Batch), c_void_p, c_void_p], None
        self._roll = library.cospec_llama_rollout
        self._roll.argtypes, self._roll.restype = [c_void_p, POINTER(_Batch), POINTER(_Rollout)], None
        self._handle: int = new(byref(spec))
        weakref.finalize(self, free, self._handle)

    def _tensor(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.cpu().contiguous())
        return int(self._kept[-1].data_ptr())

    def _linear(self, affine: Affine, kind: Kind) -> int:
        self._kept.append(PackedLinear(*affine, kind))
        return int(self._kept[-1].handle)

    def _layer(self, layer: LayerWeights, kind: Kind) -> _LayerSpec:
        gate_up: Affine = (_interleave(layer.gate[0], layer.up[0]), None)
        if layer.gate[1] is not None and layer.up[1] is not None:
            gate_up = (gate_up[0], _interleave(layer.gate[1], layer.up[1]))
        norms = (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
        linears = (layer.qkv, layer.output, gate_up, layer.down)
        return _LayerSpec(
            *(self._tensor(norm) for norm in norms), *(self._linear(x, kind) for x in linears), layer.window or 0
        )

    def logits(self, batch: PackedBatch, layers: Sequence[LayerPages]) -> Tensor:
        """See ``FusedLlama.logits``."""
        logits = torch.empty(batch.logit_rows.shape[0], self._vocab_size)
        k_pages, v_pages = self._pages(layers)
        self._run(self._handle, byref(_packed(batch, k_pages, v_pages)), logits.data_ptr())
        return logits

    def states(self, batch: PackedBatch, layers: Sequence[LayerPages]) -> tuple[Tensor, Tensor]:
        """See ``FusedLlama.states``."""
        rows = batch.logit_rows.shape[0]
        logits, states = torch.empty(rows, self._vocab_size), torch.empty(rows, self._hidden)
        k_pages, v_pages = self._pages(layers)
        self._read(self._handle, byref(_packed(batch, k_pages, v_pages)), logits.data_ptr(), states.data_ptr())
        return logits, states

    def rollout(self, batch: PackedBatch, layers: Sequence[LayerPages], picks: Sequence[Pick]) -> Rolled:
        """See ``protocols.Model.rollout``; ``batch`` reaches as far ahead as is fed and wants each last row."""
        count, depth, kept = len(picks), picks[0].depth, any(pick.logits for pick in picks)
        depths = np.array([pick.depth for pick in picks], dtype=np.int64)
        temperatures = np.array([pick.temperature for pick in picks])
        streams = np.array([pick.stream for pick in picks], dtype=np.uint64)
        tokens = np.full((count, depth), -1, dtype=np.int64)
        logits = np.empty((depth if kept else 1, count, self._vocab_size), dtype=np.float32)
        q = np.empty((count, depth, self._vocab_size)) if temperatures.any() else None
        confidence = np.empty((count, depth)) if any(pick.confident for pick in picks) else None
        k_pages, v_pages = self._pages(layers)
        job = _Rollout(
            temperatures.ctypes.data, streams.ctypes.data, depths.ctypes.data, depth,
            logits.ctypes.data, logits[0].size if kept else 0,
            None if q is None else q.ctypes.data, tokens.ctypes.data,
            None if confidence is None else confidence.ctypes.data,
        )  # fmt: skip
        self._roll(self._handle, byref(_packed(batch, k_pages, v_pages)), byref(job))
        return Rolled(tokens.tolist(), q, confidence, logits if kept else None)

    def _pages(self, layers: Sequence[LayerPages]) -> tuple[Any, Any]:
        keys = self._pointers(*(layer.keys.data_ptr() for layer in layers))
        return keys, self._pointers(*(layer.values.data_ptr() for layer in layers))


def _packed(batch: PackedBatch, k_pages: Any, v_pages: Any) -> _Batch:
    """The batch as the library reads it; it points into ``batch`` and the page lists, which must outlive the call."""
    tables, wanted = batch.tables, batch.logit_rows
    return _Batch(
        batch.ids.data_ptr(), batch.positions.data_ptr(), batch.row_segment.data_ptr(), batch.visible.data_ptr(),
        batch.mask.data_ptr(), tables.data_ptr(), batch.starts.data_ptr(), batch.write_at.data_ptr(),
        wanted.data_ptr(), ctypes.addressof(k_pages), ctypes.addressof(v_pages),
        batch.ids.shape[0], tables.shape[0], wanted.shape[0], batch.page_size, tables.shape[1],
    )  # fmt: skip


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows in turns of 32 gates and their 32 inputs, zeros behind the last; ``[F, ...]`` twice to ``[2 F', ...]``."""
    missing = -gate.shape[0] % 32
    padded = [torch.cat([x, x.new_zeros(missing, *x.shape[1:])]).unflatten(0, (-1, 32)) for x in (gate, up)]
    return torch.stack(padded, 1).flatten(0, 2)
