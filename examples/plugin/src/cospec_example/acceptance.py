"""Keep every draft token that is nearly as likely as the likeliest token: faster, and not exact."""

from __future__ import annotations

from typing import ClassVar

from cospec.draws import Draws, Purpose
from cospec.plugins import Rule
from cospec.types import Draft, Scores, Verdict

SHARE = 0.3  # of the likeliest token's probability


class Threshold(Rule):
    """A token is kept when its probability is at least ``SHARE`` of the largest.

    Greedy requests have a law with one token, so their output is exact. Other outputs follow another distribution than
    the law; ``exact`` says so, and every response declares ``threshold(...)``.
    """

    name: ClassVar[str] = "threshold"  # the name of the entry point
    exact: ClassVar[bool] = False
    reads_law: ClassVar[bool] = True  # ``scores.law`` is there for greedy requests too
    trees: ClassVar[bool] = False  # chains only
    noise: ClassVar[Purpose] = Purpose.TARGET  # drafters draw with the target's own numbers

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """The first token that is not kept ends the chain; the law gives the token in its place."""
        law = scores.distribution
        kept = 0
        while kept < len(draft) and law[kept, draft.tokens[kept]] >= SHARE * law[kept].max():
            kept += 1
        token = scores.draw(kept, draft.base_len + kept, draws)
        return Verdict(tuple(range(kept)), token, bonus=kept == len(draft))
