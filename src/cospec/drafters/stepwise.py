"""Draft one token at a time, so that several drafters can continue from the same token (CoSine section 4.2).

A ``StepwiseDrafter`` is opened on a batch of sequences and returns the logits after the committed tokens. Then it is
fed one token after the other, chosen by its caller. ``commit`` compares fed and committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.drafters.cross_tokenizer import SharedVocab
from cospec.drafters.draft_kv_cache import DraftKVCache
from cospec.drafters.interfaces import NextLogits
from cospec.drafters.known_token_scores import score_known_tokens


class ModelStepwiseDrafter:
    """Steps a causal language model with a KV cache, whose token ids are the target's.

    Args:
        kv_cache: of the model; None for a new cache.
    """

    def __init__(self, model: Model, kv_cache: DraftKVCache | None = None) -> None:
        self.model = model
        self._kv_cache = kv_cache or DraftKVCache(model, SharedVocab())

    def prepare(self, contexts: Sequence[DraftContext], depths: Sequence[int]) -> TokenBatch:
        """Return the new committed tokens of all sequences with room; they count as fed."""
        fitting = [context for context, depth in zip(contexts, depths, strict=True) if self._fits(context, depth)]
        batch = self._kv_cache.backlog(fitting)
        for context in fitting:
            self._kv_cache.keep(context, (), ())
        return batch

    def extend(self, ids: Sequence[str], paths: Sequence[Sequence[int]]) -> None:
        """Note fed tokens, which count as draft tokens."""
        for id, tokens in zip(ids, paths, strict=True):
            self._kv_cache.extend(id, tokens)

    def open(self, contexts: Sequence[DraftContext], depths: Sequence[int]) -> NextLogits:
        """Run one forward over new committed tokens of all sequences with room."""
        batch = self.prepare(contexts, depths)
        if not batch.slices:
            return NextLogits((), torch.empty(0, self.model.vocab_size))
        return NextLogits(tuple(part.id for part in batch.slices), self.model.forward(batch))

    def feed(self, ids: Sequence[str], tokens: Sequence[int]) -> Tensor:
        """Run one forward of one token per sequence."""
        pairs = zip(ids, tokens, strict=True)
        return self.model.forward(
            TokenBatch(tuple(SequenceSlice(id, self._kv_cache.extend(id, (token,)), (token,)) for id, token in pairs))
        )

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """Return scores of the latest known tokens, see ``drafters.known_token_scores``."""
        return score_known_tokens(self.model, self._kv_cache, contexts)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep fed tokens that were committed; the next ``open`` overwrites the rest."""
        self._kv_cache.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences and release their cache."""
        self._kv_cache.free(ids)

    def _fits(self, context: DraftContext, depth: int) -> bool:
        """Return whether the whole path fits; otherwise the drafter does not start."""
        budget = self._kv_cache.open(context, _chain(depth))
        return budget is not None and budget.depth == depth


@cache
def _chain(depth: int) -> DraftBudget:
    """The budget of a chain."""
    return DraftBudget(depth, depth)
