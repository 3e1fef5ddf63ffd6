"""Judge by drawing: the target's own token decides which branch is followed.

The token at each position is drawn from the law with noise keyed by (seed, position), as if there were no draft. A
child that carries it is accepted; otherwise it is committed as it is. So the output is the same whatever was drafted:
a drafter can only change how many rounds it takes.
"""

from __future__ import annotations

from typing import ClassVar

from cospec.core.plugins import AcceptanceMethod
from cospec.core.rng import RandomStreams, StreamKind
from cospec.core.tree import children
from cospec.core.types import Draft, TargetProbs, VerifyResult


class Match(AcceptanceMethod):
    """Spec section 3, ``match``: exact for every tree and every way of proposing."""

    name: ClassVar[str] = "match"
    exact: ClassVar[bool] = True
    needs_probs: ClassVar[bool] = False
    trees: ClassVar[bool] = True
    stream_kind: ClassVar[StreamKind] = StreamKind.TARGET
    native_id: ClassVar[int | None] = 0

    def verify(self, draft: Draft, scores: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Walk down from the root while the drawn token is a child."""
        path: list[int] = []
        node = -1
        while True:
            token = scores.draw(node + 1, draft.base_len + len(path), draws)
            offered = children(draft.parents, node)
            kv_cache = next((child for child in offered if draft.tokens[child] == token), None)
            if kv_cache is None:
                return VerifyResult(tuple(path), token, bonus=not offered)
            path.append(kv_cache)
            node = kv_cache
