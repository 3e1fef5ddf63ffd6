"""Multiplicative weights over all drafters, whoever was used (2510.20064).

Every drafter reads the committed tokens anyway when it catches up, so how likely it finds them is free but for the
logits of those rows. Drafters look at the prompt before a request's first draft, and again at what was committed after
16, 32, 64 ... more rounds. With that and with the fate of what they drafted the weights in ``DrafterWeights`` know
about all drafters, and only those that hold most of the weight have to draft. A drafter that cannot look (one on
another machine, or with another vocabulary) says nothing while it is not asked, so it takes part at first and again
after some rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from cospec.drafters.pool.routing.selection import Feedback, Routing, RoutingInput
from cospec.drafters.pool.routing.weights import DrafterWeights

SHARE = 0.8  # of the weight of all: the heaviest drafters that hold it take part
PATIENCE = 16  # rounds after which a drafter that sits out and cannot look is asked again


class Hedge(Routing):
    """Routing ``hedge``: those that hold most of the weight."""

    name: ClassVar[str] = "hedge"
    looks: ClassVar[bool] = True
    learns: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    native_id: ClassVar[int | None] = 1

    def route(self, standing: DrafterWeights, choice: RoutingInput) -> list[int]:
        """The heaviest, and whoever has not been heard of for long."""
        chosen = choice.heaviest(SHARE)
        if not choice.silent:
            return chosen
        most = len(choice.able) if choice.most is None else max(1, choice.most)
        order = sorted(choice.able, key=lambda member: -choice.weights[member])
        silent = [member for member in order if member in choice.silent and member not in chosen]
        overdue = [member for member in silent if standing.idle[member] >= PATIENCE]
        return chosen[: max(0, most - len(overdue))] + overdue[:most]

    def learn(self, standing: DrafterWeights, parts: Mapping[int, Feedback]) -> None:
        """The weights are all it needs."""
