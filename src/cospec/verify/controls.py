"""Wrong acceptance methods, which each statistical check must detect, and a drafter with many rejections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from cospec.core.plugin_base import AcceptanceMethod, Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, TargetProbs, VerifyResult
from cospec.rng.random_streams import RandomStreams, StreamKind


class NoResidual(AcceptanceMethod):
    """Rejection sampling that replaces a rejected token by a draw from the target instead of the residual."""

    name: ClassVar[str] = "no residual"
    exact: ClassVar[bool] = False
    needs_probs: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    stream_kind: ClassVar[StreamKind] = StreamKind.DRAFT

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Test the chain from its first token."""
        probs, n = target.distribution, len(draft)
        uniforms = draws.uniforms(draft.base_len, n, StreamKind.ACCEPT)
        for node, token in enumerate(draft.tokens):
            drawn_with = 1.0 if draft.q is None else draft.q[node, token]
            if not uniforms[node] * drawn_with < probs[node, token]:
                wrong = draws.token(probs[node], draft.base_len + node, StreamKind.RECOVER)
                return VerifyResult(tuple(range(node)), wrong, bonus=False)
        return VerifyResult(tuple(range(n)), draws.token(probs[n], draft.base_len + n, StreamKind.TARGET), bonus=True)


class KeepsAll(AcceptanceMethod):
    """Keeps every draft token untested, so that the output follows the drafter."""

    name: ClassVar[str] = "keeps all"
    exact: ClassVar[bool] = False
    needs_probs: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    stream_kind: ClassVar[StreamKind] = StreamKind.DRAFT

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Accept the whole chain and draw a bonus token."""
        n = len(draft)
        return VerifyResult(
            tuple(range(n)), draws.token(target.distribution[n], draft.base_len + n, StreamKind.TARGET), bonus=True
        )


class EvenDrafter(Drafter):
    """Draws tokens uniformly from a few: often rejected and often accepted, for any target.

    Under a method that draws from the target's random stream the drafter has no q.
    """

    samples = True
    reads_hidden_states = False
    drafts_ahead = False
    learns = False

    def __init__(self, support: Sequence[int], vocab_size: int) -> None:
        self.name = "even"
        self._q = np.zeros(vocab_size)
        self._q[list(support)] = 1.0 / len(support)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return a chain as long as the budget for every context."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            base, n = len(context.tokens), min(budget.depth, budget.max_nodes)
            if n < 1:
                continue
            draws = RandomStreams(context.seed, base)
            tokens = tuple(draws.token(self._q, base + place, context.stream_kind) for place in range(n))
            q = np.tile(self._q, (n, 1)) if context.stream_kind is StreamKind.DRAFT else None
            drafts.append(Draft(context.id, base, tokens, tuple(range(-1, n - 1)), (self.name,) * n, q))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def free(self, ids: Sequence[str]) -> None:
        """Nothing to forget."""
