"""Draft one token at a time, so that several drafters can continue from the same token (CoSine section 4.2).

A ``StepwiseDrafter`` is opened on a batch of sequences and returns the logits after the committed tokens. Then it is
fed one token after the other, chosen by its caller. ``commit`` compares fed and committed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugins import CacheLease, Opening
from cospec.core.types import Commit, DraftBudget, DraftContext, TokenScores
from cospec.drafters.draft_kv_cache import CATCH_UP_TOKENS, DraftKVCache
from cospec.drafters.prompt_scoring import look
from cospec.drafters.vocab_mapping import SharedVocab


class ModelStepwiseDrafter:
    """Steps a causal language model with a KV cache, whose token ids are the target's."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._kv_cache = DraftKVCache(model, SharedVocab())
        self._direct = model.direct

    def lease(self, contexts: Sequence[DraftContext], depths: Sequence[int]) -> CacheLease | None:
        """Lease the cache if the whole forward is native; otherwise None."""
        direct, kv_cache = self._direct, self._kv_cache
        if direct is None:
            return None
        segments, ids = array("q"), array("q")
        for context, depth in zip(contexts, depths, strict=True):
            tokens, known = context.tokens, len(context.tokens)
            fed = None
            if known + depth <= self.model.max_len and not context.assumed:
                fed = kv_cache.lease(context.id, tokens, depth - 1)
            if fed is None or known - fed > CATCH_UP_TOKENS:
                return None
            segments.extend((fed, known - fed, 0, known - fed - 1, *direct.pages(context.id)))
            ids.extend(tokens[fed:])
        return CacheLease(direct.names, segments, ids)

    def release_lease(self, contexts: Sequence[DraftContext], fed: Sequence[Sequence[int]]) -> None:
        """End the lease; fed tokens count as draft tokens."""
        for context, tokens in zip(contexts, fed, strict=True):
            self._kv_cache.keep(context, tokens, range(-1, len(tokens) - 1))

    def open(self, contexts: Sequence[DraftContext], depths: Sequence[int]) -> Opening | None:
        """Run one forward over new committed tokens of all sequences."""
        fitting = [context for context, depth in zip(contexts, depths, strict=True) if self._fits(context, depth)]
        if not fitting:
            return None
        logits = self.model.forward(self._kv_cache.backlog(fitting))
        for context in fitting:
            self._kv_cache.keep(context, (), ())
        return Opening(tuple(context.id for context in fitting), logits)

    def look(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """Return scores of the latest known tokens, see ``drafters.prompt_scoring``."""
        return look(self.model, self._kv_cache, contexts)

    def feed(self, ids: Sequence[str], tokens: Sequence[int]) -> Tensor:
        """Run one forward of one token per sequence."""
        pairs = zip(ids, tokens, strict=True)
        return self.model.forward(
            TokenBatch(tuple(SequenceSlice(id, self._kv_cache.extend(id, token), (token,)) for id, token in pairs))
        )

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep fed tokens that were committed; the next ``open`` overwrites the rest."""
        self._kv_cache.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences and release their cache."""
        self._kv_cache.free(ids)

    def _fits(self, context: DraftContext, depth: int) -> bool:
        """Return whether the whole path fits; otherwise the drafter does not start."""
        budget = self._kv_cache.open(context, DraftBudget(depth, depth))
        return budget is not None and budget.depth == depth
