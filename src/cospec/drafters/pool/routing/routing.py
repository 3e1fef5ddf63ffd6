"""The interface of routings, and its inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from cospec.drafters.calibration import CalibrationSample
from cospec.drafters.pool.routing.drafter_weights import DrafterWeights, total
from cospec.plugin_options import Options as PluginOptions
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind

Similarity = Callable[[int, int], float]  # of two tokens, 0 to 1
Streams = Callable[[int, int], RandomStreams]  # by seed, and by the committed tokens at the start of a step


def real_streams(seed: int, base: int) -> RandomStreams:
    """Return the random numbers of an engine."""
    return RandomStreams(seed, base)


class RoutingInput(NamedTuple):
    """The drafters to choose from for one sequence in one step.

    Attributes:
        able: drafters that may take part, by number; never empty, lookups apart.
        most: maximum number to choose, as the policy says; None leaves the number to the routing.
        weights: ``[M]``, of the request, see ``DrafterWeights.weights``.
        unscored: drafters of ``able`` that cannot score known tokens.
        loads: ``[M]``, see ``Executor.load``; empty for none.
        seed, base: the sequence's seed, and its number of committed tokens.
        streams: makes ``draws``; an enumeration draws otherwise.
    """

    able: tuple[int, ...]
    most: int | None
    weights: Sequence[float]
    seed: int
    base: int
    unscored: frozenset[int] = frozenset()
    loads: Sequence[float] = ()
    streams: Streams = real_streams

    @property
    def draws(self) -> RandomStreams:
        """The random numbers of the step."""
        return self.streams(self.seed, self.base)

    def uniforms(self, count: int) -> Floats:
        """Return ``count`` uniform numbers that only this choice uses."""
        return self.draws.uniforms(self.base, count, StreamKind.ROUTE)

    def heaviest(self, share: float) -> list[int]:
        """Return the heaviest drafters with a ``share`` of the weight, heaviest first, or ``most`` drafters."""
        weights, held = self.weights, 0.0
        order = sorted(self.able, key=[-weight for weight in weights].__getitem__)
        if self.most is not None:
            return order[: max(1, self.most)]
        wanted = total([weights[member] for member in order]) * share
        for count, member in enumerate(order, 1):
            held += weights[member]
            if held >= wanted:
                return order[:count]
        return order


class Feedback(NamedTuple):
    """One drafter's candidates in a committed step.

    Attributes:
        hits, seen: right candidates, and candidates that could be verified.
        proposed: positions with a candidate.
        samples: calibration samples of verified candidates.
        second_samples: calibration samples of second choices.
        similarities: of each verified candidate to the committed token, 0 to 1; empty where nothing compares.
    """

    hits: float
    seen: int
    proposed: int
    samples: Sequence[CalibrationSample]
    second_samples: Sequence[CalibrationSample] = ()
    similarities: Sequence[float] = ()


class RoutingOptions(PluginOptions):
    """A routing without options of its own."""


class Routing(ABC):
    """Chooses drafters; learned values of a request are in its ``DrafterWeights``.

    Attributes:
        compares: learns how similar a wrong token is to the committed token, where the target has embeddings.
    """

    compares: bool = False
    Options: ClassVar[type[PluginOptions]] = RoutingOptions
    name: ClassVar[str]
    scores_known_tokens: ClassVar[bool]  # whether drafters score known tokens
    learns: ClassVar[bool]  # whether the routing learns more than the weights do
    weighs: ClassVar[bool]  # whether weights exclude drafters

    @classmethod
    def build(cls, options: Any) -> Self:
        """Build the routing from its ``Options``."""
        return cls()

    @abstractmethod
    def route(self, weights: DrafterWeights, choice: RoutingInput) -> list[int]:
        """Return at least one of ``choice.able``."""

    @abstractmethod
    def learn(self, weights: DrafterWeights, parts: Mapping[int, Feedback]) -> None:
        """Learn from the candidates of the drafters in the committed step."""
