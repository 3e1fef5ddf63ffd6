"""Multiplicative weights over all drafters, including unused drafters (2510.20064).

A drafter that takes part again reads the tokens of missed steps anyway. Where drafters draft alone (``vote``,
``union``), this forward also counts how many of these tokens the drafter would have drafted
(``DraftBudget.count_hits``). The count costs the rows' logits alone. In lockstep (``fuse``, ``mix``) the count would
cost a forward of its own, because a native call reads the tokens and keeps only the last row. Drafters also score the
prompt before a request's first draft, and committed tokens after 32, 64, 128 ... more steps, unless one drafter leads
clearly. At first one leads where earlier requests with like prompts had the same best drafter, see ``prompt_prior``.
Prompts, scores, hits and the results of drafts give ``DrafterWeights`` of all drafters. Only drafters with most of the
weight draft. A drafter in a thread or process of its own, or on a node, scores while the target works. Its scores count
when they arrive. A drafter that cannot score (with another vocabulary) gives no information while unused. So this
drafter takes part initially, and again after some steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from cospec.drafters.pool.routing.drafter_weights import DrafterWeights
from cospec.drafters.pool.routing.routing import Feedback, Routing, RoutingInput

SHARE = 0.8  # share of the total weight that the chosen drafters hold
PATIENCE = 16  # steps after which an unused drafter that cannot score is chosen again


class Hedge(Routing):
    """Routing ``hedge``: the drafters that hold most of the weight."""

    name: ClassVar[str] = "hedge"
    scores_known_tokens: ClassVar[bool] = True
    learns: ClassVar[bool] = False
    weighs: ClassVar[bool] = True

    def route(self, weights: DrafterWeights, choice: RoutingInput) -> list[int]:
        """Return the heaviest drafters, and drafters without recent information."""
        chosen = choice.heaviest(SHARE)
        if not choice.unscored:
            return chosen
        most = len(choice.able) if choice.most is None else max(1, choice.most)
        order = sorted(choice.able, key=lambda member: -choice.weights[member])
        unscored = [member for member in order if member in choice.unscored and member not in chosen]
        overdue = [member for member in unscored if weights.idle[member] >= PATIENCE]
        return chosen[: max(0, most - len(overdue))] + overdue[:most]

    def learn(self, weights: DrafterWeights, parts: Mapping[int, Feedback]) -> None:
        """Do nothing: the weights suffice."""
