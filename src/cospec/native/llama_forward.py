"""The Llama family's forward as one call into the native kernels."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cospec.core.model_io import RolloutOutput, RolloutParams, TokenBatch
from cospec.models.files.array_file import PackedModel
from cospec.models.input_batch import InputBatch, check
from cospec.models.kv_cache import KVCache, LayerBlocks
from cospec.native import operators, structs
from cospec.native.library import address, start
from cospec.native.structs import packer

_CONFIG, _INPUT_BATCH, _ROLLOUT = packer(structs.LlamaConfig), packer(structs.InputBatch), packer(structs.Rollout)
_BATCH, _CACHE = packer(structs.BatchView), packer(structs.KVCacheView)


@dataclass(frozen=True, slots=True)
class _Batch:
    """A ``BatchView``, the arrays that the struct points to, and the number of rows that get logits."""

    packed: bytes
    arrays: tuple[array[int], ...]
    rows: int


class NativeLlama:
    """The whole forward as one call into the kernels.

    Args:
        model: weights that ``llama_weight_packing.pack`` packed.
    """

    def __init__(self, model: PackedModel) -> None:
        self._model, facts = model, model.facts  # the library points into the arrays and handles
        self._linears = {
            name: operators.LinearHandle(kernel, (outputs, inputs), model.arrays, name)
            for name, (kernel, outputs, inputs) in facts["linears"].items()
        }
        self._experts = {
            name: [operators.LinearHandle(kernel, (outputs, inputs), model.arrays, name, n) for n in range(count)]
            for name, (kernel, outputs, inputs, count) in facts["experts"].items()
        }
        self._tables = {name: array("Q", [one.address for one in own]) for name, own in self._experts.items()}
        self._vocab_size, self._hidden = facts["vocab_size"], facts["config"]["hidden"]
        layers = np.zeros(len(facts["layers"]), structs.LlamaLayer)
        for number, own in enumerate(facts["layers"]):
            layers[number] = self._fields(structs.LlamaLayer, own, f"layers.{number}.")
        known = {
            **facts["config"],
            "layers": address(layers),
            "embedding_format": operators.kernel_id(facts["embedding_kernel"]),
        }
        library = operators.cdll()
        self._forward, self._hidden_states = library.cospec_llama_forward, library.cospec_llama_hidden_states
        self._handle: int = library.cospec_llama_new(_CONFIG.pack(*self._fields(structs.LlamaConfig, known)))
        weakref.finalize(self, library.cospec_llama_free, self._handle)

    def _fields(self, struct: structs.Layout, known: Mapping[str, Any], place: str = "") -> tuple[Any, ...]:
        """Return the fields of a struct: known values, addresses of handles and arrays, or 0."""
        return tuple(known[name] if name in known else self._address(place + name) for name in struct.names or ())

    def _address(self, name: str) -> int:
        if name in self._linears:
            return self._linears[name].address
        if name in self._tables:
            return start(self._tables[name])
        return address(self._model.arrays[name]) if name in self._model.arrays else 0

    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """Return float32 logits ``[R, V]`` of the batch, and write its keys and values."""
        logits = torch.empty(batch.logit_rows.shape[0], self._vocab_size)
        keys, values = page_addresses(layers)
        self._forward(self._handle, _packed(batch, keys, values, _cache_format(layers)), logits.data_ptr())
        return logits

    def states(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> tuple[Tensor, Tensor]:
        """Return logits ``[R, V]`` and the states ``[R, hidden]`` after the last norm."""
        rows = batch.logit_rows.shape[0]
        logits, states = torch.empty(rows, self._vocab_size), torch.empty(rows, self._hidden)
        keys, values = page_addresses(layers)
        packed = _packed(batch, keys, values, _cache_format(layers))
        self._hidden_states(self._handle, packed, logits.data_ptr(), states.data_ptr())
        return logits, states

    def on(self, cache: KVCache, max_len: int) -> NativeModelForward:
        """Return the forward on one cache."""
        return NativeModelForward(self, cache, max_len)

    @property
    def vocab_size(self) -> int:
        return int(self._vocab_size)

    @property
    def handle(self) -> int:
        """The library's handle of the model."""
        return self._handle


class NativeModelForward:
    """Implements ``interfaces.NativeForward``: a model on its cache. Python makes no tensors of the batch.

    The library builds the batch that ``InputBatch`` would hold. The library refuses a batch that ``input_batch.check``
    or ``input_batch.pack`` refuse; both then raise the error.
    """

    def __init__(self, runner: NativeLlama, cache: KVCache, max_len: int) -> None:
        self._runner, self._cache, self._max_len = runner, cache, max_len  # the structs below point into the first two
        self._tables, self.vocab_size = cache.pages.table, runner.vocab_size
        self._keys, self._values = page_addresses(cache.layers)
        format = operators.cache_format(cache.dtype)
        view = (start(self._keys), start(self._values), format, cache.pages.page_size, runner.vocab_size, max_len)
        self._cache_view = array("B", _CACHE.pack(*view))
        library = operators.cdll()
        self._score, self._rollout = library.cospec_llama_score, library.cospec_llama_rollout
        self.handles = (runner.handle, start(self._cache_view))

    def pages(self, id: str) -> tuple[int, int]:
        """Return the address of a sequence's page table, and the number of pages."""
        return self._tables(id).buffer_info()

    def score(self, batch: TokenBatch) -> Tensor:
        """See ``interfaces.NativeForward``."""
        given = self._pack(batch)
        logits = torch.empty(max(given.rows, 0), self.vocab_size)
        if not self._score(*self.handles, given.packed, logits.data_ptr()):
            self._refuse(batch, 0)
        return logits

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """See ``interfaces.NativeForward``."""
        count, depth = len(params), params[0].depth
        depths = array("q", [own.depth for own in params])
        temperatures = array("d", [own.temperature for own in params])
        streams = array("Q", [word for own in params for word in own.stream])
        tokens = array("q", [-1]) * (count * depth)
        shape = (count, depth, self.vocab_size)
        q = np.empty(shape) if any(temperatures) else None
        confidence = np.empty((count, depth)) if any([own.confident for own in params]) else None
        logits = None
        if any([own.logits for own in params]):
            logits = np.empty((depth, count, self.vocab_size), dtype=np.float32)
        given = self._pack(batch)
        hits = array("q", bytes(8 * count)) if given.rows > count else None
        job = _ROLLOUT.pack(
            start(temperatures), start(streams), start(depths), depth, _address(logits),
            0 if logits is None else logits[0].size, _address(q), start(tokens), _address(confidence),
            0 if hits is None else start(hits),
        )  # fmt: skip
        if not self._rollout(*self.handles, given.packed, job):
            self._refuse(batch, depth - 1)
        chosen = [tokens[place : place + depth].tolist() for place in range(0, count * depth, depth)]
        rows = None if logits is None else torch.from_numpy(logits)
        return RolloutOutput(chosen, q, confidence, rows, () if hits is None else hits)

    def _refuse(self, batch: TokenBatch, ahead: int) -> NoReturn:
        """Raise the error of a batch that the library refused; ``ahead`` more tokens of each sequence need room."""
        check(batch, self.vocab_size, self._max_len - ahead)
        self._cache.pack(batch, ahead=ahead)
        raise ValueError("the native library refuses a batch that has no error")

    def _pack(self, batch: TokenBatch) -> _Batch:
        slices, ids, parents, rows = array("q"), array("q"), array("q"), 0
        for part in batch.slices:
            tokens, table = part.tokens, self._tables(part.id)
            ids.extend(tokens)
            if part.parents:
                parents.extend(part.parents)
            at, pages = table.buffer_info()
            slices.extend((part.start, len(tokens), len(part.parents), part.logits_from, at, pages))
            rows += len(tokens) - part.logits_from
        packed = _BATCH.pack(start(slices), start(ids), start(parents), len(batch.slices))
        return _Batch(packed, (slices, ids, parents), rows)


def page_addresses(layers: Sequence[LayerBlocks]) -> tuple[array[int], array[int]]:
    """Return the addresses of the keys and of the values of each layer."""
    keys = array("Q", [layer.keys.data_ptr() for layer in layers])
    return keys, array("Q", [layer.values.data_ptr() for layer in layers])


def _cache_format(layers: Sequence[LayerBlocks]) -> int:
    return operators.cache_format(layers[0].keys.dtype)


def _address(numbers: NDArray[Any] | None) -> int:
    return 0 if numbers is None else address(numbers)


def _packed(batch: InputBatch, keys: array[int], values: array[int], cache_format: int) -> bytes:
    """Return an ``InputBatch`` that points into ``batch``, ``keys`` and ``values``, which must outlive the call."""
    tables, wanted = batch.tables, batch.logit_rows
    return _INPUT_BATCH.pack(
        batch.ids.data_ptr(), batch.positions.data_ptr(), batch.row_segment.data_ptr(), batch.visible.data_ptr(),
        batch.mask.data_ptr(), tables.data_ptr(), batch.starts.data_ptr(), batch.write_at.data_ptr(),
        wanted.data_ptr(), start(keys), start(values),
        batch.ids.shape[0], tables.shape[0], wanted.shape[0], batch.page_size, tables.shape[1], cache_format,
    )  # fmt: skip
