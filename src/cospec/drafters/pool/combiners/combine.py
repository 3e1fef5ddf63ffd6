"""What a combiner works on: one sequence, the drafters that take part, and what each of them said."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from cospec.core.rng import Floats, StreamKind
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import CalibrationSample
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.routing.selection import Feedback
from cospec.drafters.pool.routing.weights import total

UNKNOWN = 0.5  # the raw confidence of a drafter that gives none


class ConfidenceCalibration(Protocol):
    """What a drafter's confidence is worth."""

    def __call__(self, member: int, raw: float, rank: int = 0) -> float:
        """The calibrated chance that its token is committed when the one before it was; rank 1: its next best one."""


class CandidateSet(Protocol):
    """What one drafter said about one sequence in one round, kept until the tokens are known."""

    def verify(self, committed: Sequence[int]) -> Feedback:
        """Against what was committed."""


@dataclass(slots=True)
class CombineTask:
    """One sequence to draft for.

    Attributes:
        budget: of the combined draft.
        weights: ``[M]``, of the drafters that take part, summing to 1; 0 for the others.
        steppers: drafters that are led token by token.
        trust: calibrated confidence, for this request.
        drafts: whole drafts by drafter; filled by the pool before the combiner is called.
        slates: what everybody said, by drafter; filled by the pool and the combiner.
    """

    context: DraftContext
    budget: DraftBudget
    weights: Sequence[float]
    steppers: tuple[int, ...]
    trust: ConfidenceCalibration
    drafts: dict[int, Draft] = field(default_factory=dict)
    slates: dict[int, CandidateSet] = field(default_factory=dict)

    @property
    def base(self) -> int:
        """Committed tokens."""
        return len(self.context.tokens)

    def trusts(self, member: int) -> list[float]:
        """The calibrated confidences of a whole draft's nodes."""
        draft = self.drafts[member]
        if draft.confidence is None:
            return [self.trust(member, UNKNOWN)] * len(draft.tokens)
        return [self.trust(member, raw) for raw in draft.confidence.tolist()]


class Combiner(ABC):
    """Makes one draft per sequence.

    A draft whose tokens were chosen by comparing drawn values follows no known distribution, so it has no q and only a
    rule that draws its tokens with the target's own noise may judge it: ``stream_kinds`` says which.
    """

    name: ClassVar[str]
    stream_kinds: ClassVar[frozenset[StreamKind]]  # of the rules that may judge its drafts
    steps: ClassVar[bool]  # leads drafters that can be led, instead of asking them for whole drafts
    gathers: ClassVar[bool]  # every draft adds to what is verified, so that each is worth what is new in it
    branches: ClassVar[bool]  # takes whole drafts that branch, and makes some
    confident: ClassVar[bool]  # compares the confidences of whole drafts, so that they are worth some time
    native_id: ClassVar[int | None] = None  # place in ``pool.compiled.COMBINERS``; None: the combiner runs in Python

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.native_id = vars(cls).get("native_id")  # a subclass may combine differently than its base class

    @abstractmethod
    def combine(self, jobs: Sequence[CombineTask], session: LockstepSession, names: Sequence[str]) -> list[Draft]:
        """One draft for each job that anybody had something for."""


@dataclass(slots=True)
class DraftCandidates:
    """A whole draft."""

    draft: Draft

    def verify(self, committed: Sequence[int]) -> Feedback:
        """Every node whose parent was committed; a position is right when any of its nodes is."""
        draft, node, hits, seen = self.draft, -1, 0, 0
        if draft.is_chain:
            return self._judge_chain(committed)
        capabilities_of: dict[int, list[int]] = {}
        for child, parent in enumerate(draft.parents):
            capabilities_of.setdefault(parent, []).append(child)
        raw = self._raw()
        lessons: list[CalibrationSample] = []
        for token in committed:
            if node not in capabilities_of:
                break
            seen += 1
            right = None
            for child in capabilities_of[node]:
                same = draft.tokens[child] == token
                lessons.append((raw[child], float(same)))
                if same and right is None:
                    right = child
            if right is None:
                break
            node = right
            hits += 1
        return Feedback(hits, seen, draft.depth, lessons)

    def _judge_chain(self, committed: Sequence[int]) -> Feedback:
        tokens, lessons = self.draft.tokens, list[CalibrationSample]()
        for confidence, token, right in zip(self._raw(), tokens, committed, strict=False):
            if token != right:
                lessons.append((confidence, 0.0))
                return Feedback(len(lessons) - 1, len(lessons), len(tokens), lessons)
            lessons.append((confidence, 1.0))
        return Feedback(len(lessons), len(lessons), len(tokens), lessons)

    def _raw(self) -> list[float]:
        draft = self.draft
        return [UNKNOWN] * len(draft.tokens) if draft.confidence is None else draft.confidence.tolist()


class Candidate(NamedTuple):
    """What one drafter proposes at one position.

    Attributes:
        token: what it chooses or would draw; -1 where it gives a distribution from which nothing was drawn.
        confidence: raw.
        q: ``[V]``, where it gives a distribution rather than one token.
        second: its next best token, and how sure it is of that one.
    """

    token: int
    confidence: float
    q: Floats | None = None
    second: tuple[int, float] | None = None

    def value(self, committed: int) -> float:
        """How right it was: whether it has that token, or how likely that was to it where it has none."""
        return float(self.token == committed) if self.q is None or self.token >= 0 else float(self.q[committed])

    def chance(self, token: int) -> float:
        """How likely it proposes a token."""
        return float(self.token == token) if self.q is None else float(self.q[token])


@dataclass(slots=True)
class StepCandidates:
    """Guesses along tokens that all drafters continued from.

    Attributes:
        spine: the shared tokens; grows while the draft is made.
        guesses: from the first position on, one after the other; each follows the spine up to it.
    """

    spine: Sequence[int]
    guesses: list[Candidate] = field(default_factory=list)

    def verify(self, committed: Sequence[int]) -> Feedback:
        """The guesses up to the first committed token that the spine has not."""
        agreed, most = 0, min(len(self.spine), len(committed))
        while agreed < most and self.spine[agreed] == committed[agreed]:
            agreed += 1
        known = list(zip(self.guesses[: agreed + 1], committed, strict=False))
        lessons = [(guess.confidence, guess.value(token)) for guess, token in known]
        pairs = [(guess.second, token) for guess, token in known if guess.second is not None]
        seconds = tuple([(second[1], float(second[0] == token)) for second, token in pairs])
        return Feedback(total(value for _, value in lessons), len(lessons), len(self.guesses), lessons, seconds)


def confidence_of(draft: Draft, node: int) -> float:
    """What the drafter itself says about a node."""
    return UNKNOWN if draft.confidence is None else float(draft.confidence[node])
