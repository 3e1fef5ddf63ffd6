"""Keep every draft token that is nearly as likely as the likeliest token: faster, and not exact."""

from __future__ import annotations

from typing import ClassVar

from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Draft, TargetProbs, VerifyResult
from cospec.rng.random_streams import RandomStreams, StreamKind

SHARE = 0.3  # of the likeliest token's probability


class Threshold(AcceptanceMethod):
    """A token is kept when its probability is at least ``SHARE`` of the largest.

    The target distribution of a greedy request has one token, so the output is exact. Other outputs follow another
    distribution; ``exact`` says so, and every response declares ``threshold(...)``.
    """

    name: ClassVar[str] = "threshold"  # the name of the entry point
    exact: ClassVar[bool] = False
    needs_probs: ClassVar[bool] = True  # ``target.probs`` is set for greedy requests too
    trees: ClassVar[bool] = False  # chains only
    stream_kind: ClassVar[StreamKind] = StreamKind.TARGET  # drafters draw with the target's own numbers

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """The first token that is not kept ends the chain; the target distribution gives the token in its place."""
        distribution = target.distribution
        kept = 0
        while kept < len(draft) and distribution[kept, draft.tokens[kept]] >= SHARE * distribution[kept].max():
            kept += 1
        token = target.draw(kept, draft.base_len + kept, draws)
        return VerifyResult(tuple(range(kept)), token, bonus=kept == len(draft))
