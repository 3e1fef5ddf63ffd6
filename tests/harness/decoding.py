"""Decoding by the Llama forward in torch: a model, a cache with scattered pages, and a run of all kinds of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.attention.backend import AttentionBackend
from cospec.models.attention.sdpa import SDPA
from cospec.models.block_manager import BlockPool
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache, LayerBlocks, LayerShape
from cospec.models.llama import TorchRunner
from cospec.models.llama_weights import read_weights, tensors_of
from cospec.models.weights.fp32 import Fp32
from harness.tiny import tiny, tokens


class Forward(Protocol):
    """What computes logits."""

    def logits(self, batch: InputBatch, layers: Sequence[LayerBlocks]) -> Tensor:
        """See ``FusedLlama.logits``."""


LENGTHS = (70, 5, 33, 1, 120)


def runner_of(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, attention: AttentionBackend = SDPA
) -> tuple[TorchRunner, KVCache]:
    """A model and a cache in which five sequences have scattered pages."""
    model = tiny(name).to(device, dtype)
    config = model.config
    shape = LayerShape(config.num_key_value_heads, model.model.layers[0].self_attn.head_dim)
    pool = BlockPool(60, 16)
    for part in (1, 2, 3):
        for number, length in enumerate(LENGTHS):
            assert pool.allocate(f"s{number}", (length + 20) * part // 3)
    kv = KVCache([shape] * config.num_hidden_layers, pool, dtype, torch.device(device), attention.by_head)
    return TorchRunner(read_weights(model.config, tensors_of(model), Fp32()), attention), kv


def prompts(kv: KVCache) -> InputBatch:
    """All prompts but for their logits."""
    slices = [SequenceSlice(f"s{n}", 0, tokens(length, n), logits_from=length) for n, length in enumerate(LENGTHS)]
    return kv.pack(TokenBatch(tuple(slices)))


def decode(kv: KVCache, step: int, *numbers: int, logits_from: int = 0) -> InputBatch:
    """The next token of each of the sequences."""
    slices = [SequenceSlice(f"s{n}", LENGTHS[n] + step, tokens(1, 50 + step + n), (), logits_from) for n in numbers]
    return kv.pack(TokenBatch(tuple(slices)))


def play(runner: Forward, kv: KVCache) -> list[Tensor]:
    """Prompts, steps of changing sequences, a batch of another pattern, and steps again; results are read at the end,
    when later steps have had their chance to spoil them."""
    results = [runner.logits(prompts(kv), kv.layers)]
    results += [runner.logits(decode(kv, step, 0, 1, 2, 3, 4), kv.layers) for step in range(3)]
    results += [runner.logits(decode(kv, step, 4, 1, 0), kv.layers) for step in range(3, 6)]
    wide = kv.pack(TokenBatch((SequenceSlice("s2", 36, (1, 2, 3)), SequenceSlice("s3", 4, (5,)))))
    results.append(runner.logits(wide, kv.layers))
    results += [runner.logits(decode(kv, 6, 4), kv.layers)]
    results += [runner.logits(decode(kv, 7, 4, 0, 1, logits_from=1), kv.layers)]
    return [*results, runner.logits(decode(kv, 8, 4, 1, 0), kv.layers)]
