"""Judge by drawing: the target's own token decides which branch is followed.

The token at each position is drawn from the law with noise keyed by (seed, position), as if there were no draft. A
child that carries it is accepted; otherwise it is committed as it is. So the output is the same whatever was drafted:
a drafter can only change how many rounds it takes.
"""

from __future__ import annotations

from typing import ClassVar

from cospec.draws import Draws, Purpose
from cospec.plugins import Rule
from cospec.tree import children
from cospec.types import Draft, Scores, Verdict


class Match(Rule):
    """Spec section 3, ``match``: exact for every tree and every way of proposing."""

    name: ClassVar[str] = "match"
    exact: ClassVar[bool] = True
    reads_law: ClassVar[bool] = False
    trees: ClassVar[bool] = True
    noise: ClassVar[Purpose] = Purpose.TARGET
    native_id: ClassVar[int | None] = 0

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Walk down from the root while the drawn token is a child."""
        path: list[int] = []
        node = -1
        while True:
            token = scores.draw(node + 1, draft.base_len + len(path), draws)
            offered = children(draft.parents, node)
            follower = next((child for child in offered if draft.tokens[child] == token), None)
            if follower is None:
                return Verdict(tuple(path), token, bonus=not offered)
            path.append(follower)
            node = follower
