"""What a combiner works on: one sequence, the drafters that take part, and what each of them said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from cospec.drafters.combiners.session import Session
from cospec.drafters.routing.choice import Level
from cospec.draws import Floats, Purpose
from cospec.tree import children
from cospec.types import Budget, Context, Draft

UNKNOWN = 0.5  # the raw confidence of a drafter that gives none

Trust = Callable[[int, float], float]
"""(drafter, raw confidence) to the calibrated chance that its token is committed when the one before it was."""
Lesson = tuple[float, float]
"""(raw confidence, 1 for a guess that was right or 0, or the probability it gave to the token)."""


class Slate(Protocol):
    """What one drafter said about one sequence in one round, kept until the tokens are known."""

    def levels(self, committed: Seq[int], trust: Callable[[float], float]) -> list[Level]:
        """One for each position that the drafter guessed at."""

    def lessons(self, committed: Seq[int]) -> list[Lesson]:
        """One for each guess that can be told right or wrong."""


@dataclass(slots=True)
class Job:
    """One sequence to draft for.

    Attributes:
        budget: of the combined draft.
        weights: ``[M]``, of the drafters that take part, summing to 1; 0 for the others.
        steppers: drafters that are led token by token.
        trust: calibrated confidence, for this request.
        drafts: whole drafts by drafter; filled by the pool before the combiner is called.
        slates: what everybody said, by drafter; filled by the pool and the combiner.
    """

    context: Context
    budget: Budget
    weights: Floats
    steppers: tuple[int, ...]
    trust: Trust
    drafts: dict[int, Draft] = field(default_factory=dict)
    slates: dict[int, Slate] = field(default_factory=dict)

    @property
    def base(self) -> int:
        """Committed tokens."""
        return len(self.context.tokens)


class Combiner(Protocol):
    """Makes one draft per sequence.

    A draft whose tokens were chosen by comparing drawn values follows no known distribution, so it has no q and only a
    rule that draws its tokens with the target's own noise may judge it: ``noises`` says which.
    """

    name: ClassVar[str]
    noises: ClassVar[frozenset[Purpose]]  # of the rules that may judge its drafts
    steps: ClassVar[bool]  # leads drafters that can be led, instead of asking them for whole drafts
    branches: ClassVar[bool]  # takes whole drafts that branch, and makes some

    def combine(self, jobs: Seq[Job], session: Session, names: Seq[str]) -> list[Draft]:
        """One draft for each job that anybody had something for."""


@dataclass(frozen=True, slots=True)
class DraftSlate:
    """A whole draft."""

    draft: Draft

    def levels(self, committed: Seq[int], trust: Callable[[float], float]) -> list[Level]:
        """Along the committed tokens; the positions behind a mismatch are counted but unknown."""
        found = []
        for offered, token in self._walk(committed):
            hit = any(self.draft.tokens[node] == token for node in offered)
            found.append(Level(max(trust(confidence_of(self.draft, node)) for node in offered), float(hit)))
        return found + [Level(UNKNOWN, None)] * (self.draft.depth - len(found))

    def lessons(self, committed: Seq[int]) -> list[Lesson]:
        """Every node whose parent was committed."""
        draft = self.draft
        return [
            (confidence_of(draft, node), float(draft.tokens[node] == token))
            for offered, token in self._walk(committed)
            for node in offered
        ]

    def _walk(self, committed: Seq[int]) -> Iterator[tuple[list[int], int]]:
        node = -1
        for token in committed:
            offered = children(self.draft.parents, node)
            if not offered:
                return
            yield offered, token
            found = next((child for child in offered if self.draft.tokens[child] == token), None)
            if found is None:
                return
            node = found


@dataclass(frozen=True, slots=True)
class Guess:
    """What one drafter proposes at one position.

    Attributes:
        confidence: raw.
        q: ``[V]``, where it gives a distribution rather than one token.
    """

    token: int
    confidence: float
    q: Floats | None = None

    def value(self, committed: int) -> float:
        """How right it was."""
        return float(self.token == committed) if self.q is None else float(self.q[committed])


@dataclass(slots=True)
class StepSlate:
    """Guesses along tokens that all drafters continued from.

    Attributes:
        spine: the shared tokens; grows while the draft is made.
        guesses: by position; each one follows ``spine[:position]``.
    """

    spine: Seq[int]
    guesses: dict[int, Guess] = field(default_factory=dict)

    def levels(self, committed: Seq[int], trust: Callable[[float], float]) -> list[Level]:
        """Known up to the first committed token that the spine has not."""
        known = self._known(committed)
        return [
            Level(trust(guess.confidence), guess.value(committed[place]) if place < known else None)
            for place, guess in self.guesses.items()
        ]

    def lessons(self, committed: Seq[int]) -> list[Lesson]:
        """The guesses whose prefix was committed."""
        known = self._known(committed)
        return [
            (guess.confidence, guess.value(committed[place])) for place, guess in self.guesses.items() if place < known
        ]

    def _known(self, committed: Seq[int]) -> int:
        """Committed positions whose prefix is the spine's."""
        agreed = 0
        while agreed < min(len(self.spine), len(committed)) and self.spine[agreed] == committed[agreed]:
            agreed += 1
        return min(agreed + 1, len(committed))


def confidence_of(draft: Draft, node: int) -> float:
    """What the drafter itself says about a node."""
    return UNKNOWN if draft.confidence is None else float(draft.confidence[node])
