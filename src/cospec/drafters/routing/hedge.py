"""Multiplicative weights over all drafters, whoever was used (2510.20064).

The weights come from ``Standing``: they rest on every committed token that a drafter has been seen to guess. What is
free of charge differs by drafter. One that drafted has been compared up to where its draft ended. One that is led token
by token compares its own choice with what it reads when it catches up, for a few rows more in a forward that it needs
anyway, so it knows about the tokens of all rounds it sat out, and about the prompt. One that drafts on its own says
nothing while it is not asked, so every drafter is asked again after some rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from cospec.drafters.routing.choice import Choice, Judged
from cospec.drafters.routing.standing import Standing

SHARE = 0.8  # of the weight of all: the heaviest drafters that hold it take part
PATIENCE = 16  # rounds after which a drafter that sits out is asked again


class Hedge:
    """Routing ``hedge``: all in a request's first round, then those that hold most of the weight."""

    name: ClassVar[str] = "hedge"

    def route(self, standing: Standing, choice: Choice) -> list[int]:
        """The heaviest, and whoever has not been heard of for long."""
        order = choice.heaviest()
        most = len(order) if choice.count is None else max(1, choice.count)
        if standing.rounds == 0:
            return order[:most]
        wanted, held, chosen = SHARE * sum([choice.weights[member] for member in order]), 0.0, []
        for member in order[:most]:
            chosen.append(member)
            held += choice.weights[member]
            if held >= wanted and choice.count is None:
                break
        overdue = [member for member in order if member not in chosen and standing.idle[member] >= PATIENCE]
        return chosen[: max(0, most - len(overdue))] + overdue[:most]

    def learn(self, standing: Standing, parts: Mapping[int, Judged]) -> None:
        """The weights are all it needs."""
