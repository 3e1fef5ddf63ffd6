"""What a routing decides from, and what it must do."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Protocol

from cospec.drafters.routing.standing import Standing
from cospec.draws import Draws, Floats


@dataclass(frozen=True, slots=True)
class Choice:
    """Who can be chosen for one sequence in one round.

    Attributes:
        able: drafters that may take part, by number; never empty. Those that cost nothing are not among them.
        count: how many to choose at most, as the policy says; None leaves it to the routing.
        weights: ``[M]``, of the request, see ``Standing.weights``.
        draws: of this round.
        position: at which to draw.
    """

    able: tuple[int, ...]
    count: int | None
    weights: Floats
    draws: Draws
    position: int

    def heaviest(self) -> list[int]:
        """``able``, the largest weight first."""
        return sorted(self.able, key=lambda member: -self.weights[member])


@dataclass(frozen=True, slots=True)
class Level:
    """One position of a drafter's part in a draft, after its verification.

    Attributes:
        confidence: calibrated, of its guess; of the best one where it made several.
        value: 1 when it guessed the committed token, 0 when not; its probability where it gave a distribution; None
            where the draft had left the committed tokens before, so that nobody knows.
    """

    confidence: float
    value: float | None


class Routing(Protocol):
    """Chooses drafters; what it learns of a request stands in the request's ``Standing``."""

    name: ClassVar[str]

    def route(self, standing: Standing, choice: Choice) -> list[int]:
        """At least one of ``choice.able``."""

    def learn(self, standing: Standing, levels: Mapping[int, Seq[Level]]) -> None:
        """How the drafters that took part did in the round that was just committed."""
