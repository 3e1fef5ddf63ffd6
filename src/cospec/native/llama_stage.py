"""A part of a Llama-family model as one native call: the layers of one stage, the heads of one shard."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cospec.models.files.array_file import PackedModel
from cospec.models.kv_cache import KVCache
from cospec.models.shard import Shard, SumShards
from cospec.models.stage import StageBatch
from cospec.native import operators, structs
from cospec.native.library import address, start
from cospec.native.llama_forward import NativeLlama, page_addresses
from cospec.native.structs import packer

_STAGE, _BATCH, _CACHE = packer(structs.StageIO), packer(structs.BatchView), packer(structs.KVCacheView)
_SumCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)


class NativeStage:
    """Implements ``stage.StageForward``.

    Args:
        model: the packed weights of the part.
        sizes: columns of the whole model's logits, and tokens of one sequence.
        sum: the sum over the shards of the stage; None for one shard.
    """

    def __init__(
        self, model: PackedModel, cache: KVCache, sizes: tuple[int, int], shard: Shard, sum: SumShards | None
    ) -> None:
        self.cache, self._shard = cache, shard
        self._vocab_size, max_len = sizes
        self._model = NativeLlama(model)
        self._hidden = model.facts["config"]["hidden"]
        self._keys, self._values = page_addresses(cache.layers)  # the struct below points to these
        format = operators.cache_format(cache.dtype)
        view = (start(self._keys), start(self._values), format, cache.pages.page_size, self._vocab_size, max_len)
        self._cache_view = array("B", _CACHE.pack(*view))
        self._callback = None if sum is None else _SumCallback(_on_memory(sum))
        self._sum = 0 if self._callback is None else ctypes.cast(self._callback, ctypes.c_void_p).value or 0
        self._run = operators.cdll().cospec_llama_stage

    def run(self, batch: StageBatch, states: Tensor | None) -> Tensor | None:
        """See ``stage.StageForward``; ``ValueError`` for a batch that the cache or the model cannot hold."""
        slices = batch.slices
        places = slices[:, 4].cumsum() - slices[:, 4]
        native = np.empty((len(slices), 6), np.int64)
        native[:, :4], native[:, 5] = slices[:, :4], slices[:, 4]
        native[:, 4] = places * batch.pages.itemsize + address(batch.pages)
        view = _BATCH.pack(address(native), address(batch.ids), address(batch.parents), len(slices))
        output = logits = None
        if not self._shard.last:
            output = torch.empty(len(batch.ids), self._hidden)
        elif not self._shard.rank:
            logits = torch.empty(batch.logit_rows, self._vocab_size)
        given = [0 if each is None else each.data_ptr() for each in (states, output, logits)]
        if not self._run(self._model.handle, start(self._cache_view), view, _STAGE.pack(*given, self._sum)):
            raise ValueError("the native library refuses a batch of a stage")
        return logits if output is None else output


def _on_memory(sum: SumShards) -> Callable[[int, int], None]:
    """Make ``sum`` a function of the address and the count of float32 numbers."""

    def of_numbers(at: int, count: int) -> None:
        values = np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(ctypes.c_float)), (count,))
        sum(torch.from_numpy(values))

    return of_numbers
