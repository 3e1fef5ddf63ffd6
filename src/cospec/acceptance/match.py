"""Verify by sampling: the target's own token selects the branch.

The token at each position is sampled from the target distribution with noise keyed by (seed, position), as without a
draft. A child with this token is accepted; without such a child the sampled token is committed. The output therefore
does not depend on the draft: a drafter only changes the number of steps.
"""

from __future__ import annotations

from typing import ClassVar

from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.tree import children
from cospec.core.types import Draft, TargetProbs, VerifyResult
from cospec.rng.random_streams import RandomStreams, StreamKind


class Match(AcceptanceMethod):
    """``match``: exact for every tree and every way of drafting."""

    name: ClassVar[str] = "match"
    exact: ClassVar[bool] = True
    needs_probs: ClassVar[bool] = False
    trees: ClassVar[bool] = True
    stream_kind: ClassVar[StreamKind] = StreamKind.TARGET
    reads_draws: ClassVar[bool] = True
    native_id: ClassVar[int | None] = 0
    tensor_form: ClassVar[str | None] = "cospec.acceptance.tensor.methods:match"

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Walk down from the root while the sampled token is a child."""
        path: list[int] = []
        node = -1
        while True:
            token = target.draw(node + 1, draft.base_len + len(path), draws)
            offered = children(draft.parents, node)
            accepted = next((child for child in offered if draft.tokens[child] == token), None)
            if accepted is None:
                return VerifyResult(tuple(path), token, bonus=not offered)
            path.append(accepted)
            node = accepted
