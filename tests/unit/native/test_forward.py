"""The batch that native code lays out is the one that ``packed.pack`` lays out, and it refuses what that refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from cospec.core.interfaces import NativeForward
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput
from cospec.models.block_manager import BlockPool
from cospec.models.input_batch import check
from cospec.models.kv_cache import KVCache, LayerShape
from cospec.models.llama import FusedLlama
from cospec.models.model_runner import ModelRunner
from cospec.models.weights.fp32 import Fp32
from cospec.native import operators

pytestmark = pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")
VOCAB, MAX_LEN, PAGE = 61, 150, 8


class Pair:
    """One model, asked directly and the long way, on one cache."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.3,
        )  # fmt: skip
        pool = BlockPool(80, PAGE)
        assert pool.allocate("gap", 3 * PAGE)  # page 0 belongs to another sequence
        self.cache = KVCache([LayerShape(2, 8)] * 2, pool, torch.float32, torch.device("cpu"))
        self.fused = FusedLlama.from_hf(transformers.LlamaForCausalLM(config).eval(), self.cache, Fp32())
        forwards = self.fused.forwards(self.cache, MAX_LEN)
        assert forwards.native_forward is not None
        self.native_forward: NativeForward = forwards.native_forward
        self.model = ModelRunner("pair", forwards, self.cache, VOCAB, MAX_LEN)

    def long(self, batch: TokenBatch) -> torch.Tensor:
        """By way of ``packed.pack``."""
        return self.fused.logits(self.cache.pack(batch), self.cache.layers)


def slices(rng: np.random.Generator, starts: dict[str, int]) -> tuple[SequenceSlice, ...]:
    """Pieces of prompts, chains and trees after what the cache holds of some sequences."""
    found = []
    for id in rng.permutation(sorted(starts))[: rng.integers(1, len(starts) + 1)].tolist():
        known, nodes = int(rng.integers(1, 6)), int(rng.integers(0, 9))
        tree = rng.random() < 0.5
        parents = tuple(int(rng.integers(-1, node)) if tree else node - 1 for node in range(nodes))
        tokens = tuple(rng.integers(0, VOCAB, known + nodes).tolist())
        found.append(SequenceSlice(id, starts[id], tokens, parents, int(rng.integers(0, known + nodes + 1))))
        starts[id] += known
    return tuple(found)


@pytest.mark.parametrize("seed", range(6))
def test_equal_bit_for_bit(seed: int) -> None:
    rng, pair, starts = np.random.default_rng(seed), Pair(), dict.fromkeys("abcd", 0)
    for _ in range(12):
        batch = TokenBatch(slices(rng, starts))
        for part in batch.slices:
            assert pair.cache.pages.allocate(part.id, part.start + len(part.tokens))
        found = pair.native_forward.score(batch)
        assert torch.equal(found, pair.long(batch))
        assert torch.equal(found, pair.model.forward(batch))


WRONG = {
    "nothing": (),
    "no token": (SequenceSlice("a", 0, ()),),
    "a token beyond the vocabulary": (SequenceSlice("a", 0, (1, VOCAB)),),
    "a negative token": (SequenceSlice("a", 0, (1, 2, -1)),),
    "a negative start": (SequenceSlice("a", -1, (1,)),),
    "more nodes than tokens": (SequenceSlice("a", 0, (1,), (-1, 0)),),
    "rows beyond the end": (SequenceSlice("a", 0, (1,), (), 2),),
    "a parent after its child": (SequenceSlice("a", 0, (1, 2, 3), (1, -1)),),
    "a parent before the root": (SequenceSlice("a", 0, (1, 2, 3), (-2, -1)),),
    "too large a tree": (SequenceSlice("a", 0, (1,) * 66, (-1,) * 65),),
    "too long": (SequenceSlice("a", MAX_LEN, (1,)),),
    "too deep": (SequenceSlice("a", MAX_LEN - 2, (1, 2, 3), (-1, 0)),),
    "pages that are not there": (SequenceSlice("b", 0, (1,)), SequenceSlice("a", 160, (1,))),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_amiss_is_refused_in_the_same_words(case: str) -> None:
    pair, batch = Pair(), TokenBatch(WRONG[case])
    for id in "ab":
        assert pair.cache.pages.allocate(id, 160)
    with pytest.raises((InvalidInput, ValueError, IndexError)) as wanted:
        check(batch, VOCAB, MAX_LEN)
        pair.cache.pack(batch)
    for forward in (pair.native_forward.score, pair.model.forward):
        with pytest.raises((InvalidInput, ValueError, IndexError)) as found:
            forward(batch)
        assert str(found.value) == str(wanted.value)
