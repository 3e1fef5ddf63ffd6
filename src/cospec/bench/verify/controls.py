"""Wrong on purpose: what each statistical rung must be able to see, and a drafter that gives it something to judge."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

import numpy as np

from cospec.draws import Draws, Purpose
from cospec.plugins import Drafter, Rule
from cospec.types import Budget, Commit, Context, Draft, Scores, Verdict


class NoResidual(Rule):
    """Speculative sampling that replaces a rejected token by a draw from the law itself instead of the residual."""

    name: ClassVar[str] = "no residual"
    exact: ClassVar[bool] = False
    reads_law: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    noise: ClassVar[Purpose] = Purpose.DRAFT

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Test the chain from the front."""
        law, n = scores.distribution, len(draft)
        uniforms = draws.uniforms(draft.base_len, n, Purpose.ACCEPT)
        for node, token in enumerate(draft.tokens):
            drawn_with = 1.0 if draft.q is None else draft.q[node, token]
            if not uniforms[node] * drawn_with < law[node, token]:
                wrong = draws.token(law[node], draft.base_len + node, Purpose.RECOVER)
                return Verdict(tuple(range(node)), wrong, bonus=False)
        return Verdict(tuple(range(n)), draws.token(law[n], draft.base_len + n, Purpose.TARGET), bonus=True)


class KeepsAll(Rule):
    """Keeps every draft token unseen, so that the output follows the drafter."""

    name: ClassVar[str] = "keeps all"
    exact: ClassVar[bool] = False
    reads_law: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    noise: ClassVar[Purpose] = Purpose.DRAFT

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """The whole chain and a bonus token."""
        n = len(draft)
        return Verdict(
            tuple(range(n)), draws.token(scores.distribution[n], draft.base_len + n, Purpose.TARGET), bonus=True
        )


class EvenDrafter(Drafter):
    """Draws every token evenly from a few: often rejected and often enough accepted, whatever the target is.

    Under a rule that draws with the target's noise it has no usable q, and gives none.
    """

    samples = True
    reads_states = False
    drafts_ahead = False
    learns = False

    def __init__(self, support: Seq[int], vocab_size: int) -> None:
        self.name = "even"
        self._q = np.zeros(vocab_size)
        self._q[list(support)] = 1.0 / len(support)

    def propose(self, contexts: Seq[Context], budgets: Seq[Budget]) -> list[Draft]:
        """A chain as long as the budget for everybody."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            base, n = len(context.tokens), min(budget.depth, budget.max_nodes)
            if n < 1:
                continue
            draws = Draws(context.seed, base)
            tokens = tuple(draws.token(self._q, base + place, context.noise) for place in range(n))
            q = np.tile(self._q, (n, 1)) if context.noise is Purpose.DRAFT else None
            drafts.append(Draft(context.id, base, tokens, tuple(range(-1, n - 1)), (self.name,) * n, q))
        return drafts

    def commit(self, commits: Seq[Commit]) -> None:
        """Nothing to learn."""

    def free(self, ids: Seq[str]) -> None:
        """Nothing to forget."""
