"""What a routing decides from, and what it must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from cospec.core.rng import Floats, RandomStreams, StreamKind
from cospec.drafters.calibration import CalibrationSample
from cospec.drafters.pool.routing.weights import DrafterWeights, total


class RoutingInput(NamedTuple):
    """Who can be chosen for one sequence in one round.

    Attributes:
        able: drafters that may take part, by number; never empty. Those that cost nothing are not among them.
        most: how many to choose at most, as the policy says; None leaves it to the routing.
        weights: ``[M]``, of the request, see ``DrafterWeights.weights``.
        silent: those of ``able`` that nothing is known of but what they drafted, because they cannot look.
        seed, base: of the sequence, and its committed tokens.
    """

    able: tuple[int, ...]
    most: int | None
    weights: Sequence[float]
    seed: int
    base: int
    silent: frozenset[int] = frozenset()

    def uniforms(self, count: int) -> Floats:
        """``[count]`` numbers between 0 and 1 that only this choice draws."""
        return RandomStreams(self.seed, self.base).uniforms(self.base, count, StreamKind.ROUTE)

    def heaviest(self, share: float) -> list[int]:
        """The heaviest that hold a ``share`` of the weight, the largest weight first; as many as are to be chosen."""
        order, held = sorted(self.able, key=lambda member: -self.weights[member]), 0.0
        if self.most is not None:
            return order[: max(1, self.most)]
        wanted = total(self.weights[member] for member in order) * share
        for count, member in enumerate(order, 1):
            held += self.weights[member]
            if held >= wanted:
                return order[:count]
        return order


class Feedback(NamedTuple):
    """One drafter's part in a draft, after the round was committed.

    Attributes:
        hits, seen: positions that it guessed right, and those where that can be told.
        proposed: positions that it guessed at.
        lessons: one for each guess that can be told right or wrong.
        seconds: the same of its next best guesses.
    """

    hits: float
    seen: int
    proposed: int
    lessons: Sequence[CalibrationSample]
    seconds: Sequence[CalibrationSample] = ()


class Routing(ABC):
    """Chooses drafters; what it learns of a request stands in the request's ``DrafterWeights``."""

    name: ClassVar[str]
    looks: ClassVar[bool]  # whether drafters are to look at known tokens
    learns: ClassVar[bool]  # whether it learns more than the weights do
    weighs: ClassVar[bool]  # whether drafters are left out by their weights
    native_id: ClassVar[int | None] = None  # ``Way`` in ``csrc/together.h``; None: the routing runs in Python

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.native_id = vars(cls).get("native_id")  # a subclass may route differently than its base class

    @abstractmethod
    def route(self, standing: DrafterWeights, choice: RoutingInput) -> list[int]:
        """At least one of ``choice.able``."""

    @abstractmethod
    def learn(self, standing: DrafterWeights, parts: Mapping[int, Feedback]) -> None:
        """How the drafters that took part did in the round that was just committed."""
