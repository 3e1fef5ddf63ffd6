"""Drafting one token at a time, so that several drafters can continue from the same token (CoSine section 4.2).

A drafter that offers a ``Stepper`` is opened on a batch of sequences, gives logits behind what is committed, and is
then fed one token after the other, which somebody else chose. What it was fed meets what was committed in ``commit``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from torch import Tensor

from cospec.batches import Segment, TokenBatch
from cospec.drafters.following import CATCH_UP_TOKENS, Follower
from cospec.drafters.looking import look
from cospec.drafters.vocabulary import SharedVocabulary
from cospec.plugins import Lent, Opening
from cospec.protocols import Model
from cospec.types import Budget, Commit, Context, Look


class ModelStepper:
    """Leads a causal language model with a KV cache, whose token ids are the target's."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._follower = Follower(model, SharedVocabulary())
        self._direct = model.direct

    def lend(self, contexts: Seq[Context], depths: Seq[int]) -> Lent | None:
        """Where the whole forward is native."""
        direct, follower = self._direct, self._follower
        if direct is None:
            return None
        segments, ids = array("q"), array("q")
        for context, depth in zip(contexts, depths, strict=True):
            tokens, known = context.tokens, len(context.tokens)
            fed = None
            if known + depth <= self.model.max_len and not context.assumed:
                fed = follower.lend(context.id, tokens, depth - 1)
            if fed is None or known - fed > CATCH_UP_TOKENS:
                return None
            segments.extend((fed, known - fed, 0, known - fed - 1, *direct.pages(context.id)))
            ids.extend(tokens[fed:])
        return Lent(direct.names, segments, ids)

    def take_back(self, contexts: Seq[Context], fed: Seq[Seq[int]]) -> None:
        """They are draft tokens from now on."""
        for context, tokens in zip(contexts, fed, strict=True):
            self._follower.keep(context, tokens, range(-1, len(tokens) - 1))

    def open(self, contexts: Seq[Context], depths: Seq[int]) -> Opening | None:
        """One forward over what was committed since, all sequences together."""
        fitting = [context for context, depth in zip(contexts, depths, strict=True) if self._fits(context, depth)]
        if not fitting:
            return None
        logits = self.model.forward(self._follower.backlog(fitting))
        for context in fitting:
            self._follower.keep(context, (), ())
        return Opening(tuple(context.id for context in fitting), logits)

    def look(self, contexts: Seq[Context]) -> dict[str, Look]:
        """How likely the model finds the latest known tokens, see ``drafters.looking``."""
        return look(self.model, self._follower, contexts)

    def feed(self, ids: Seq[str], tokens: Seq[int]) -> Tensor:
        """One forward of one token for each sequence."""
        pairs = zip(ids, tokens, strict=True)
        return self.model.forward(
            TokenBatch(tuple(Segment(id, self._follower.extend(id, token), (token,)) for id, token in pairs))
        )

    def commit(self, commits: Seq[Commit]) -> None:
        """What was fed and not committed is overwritten by the next opening."""
        self._follower.commit(commits)

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences and give back their cache."""
        self._follower.free(ids)

    def _fits(self, context: Context, depth: int) -> bool:
        """Whether there is room for all of the spine; a drafter that cannot go all the way does not begin."""
        budget = self._follower.open(context, Budget(depth, depth))
        return budget is not None and budget.depth == depth
