"""Use every drafter for every request."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import ClassVar

from cospec.drafters.pool.routing.drafter_weights import DrafterWeights
from cospec.drafters.pool.routing.routing import Feedback, Routing, RoutingInput


class AllDrafters(Routing):
    """Routing ``all``: the ablation "no routing" of CoSine section 6.4. A policy's count keeps the heaviest
    drafters."""

    name: ClassVar[str] = "all"
    scores_known_tokens: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    def route(self, weights: DrafterWeights, choice: RoutingInput) -> list[int]:
        """Return as many drafters as the policy allows."""
        return choice.heaviest(inf)

    def learn(self, weights: DrafterWeights, parts: Mapping[int, Feedback]) -> None:
        """Do nothing: the routing does not learn."""
