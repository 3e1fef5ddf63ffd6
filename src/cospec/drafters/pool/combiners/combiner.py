"""The interface of combiners, and their inputs: a sequence, its drafters, and the drafters' candidates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, NamedTuple, Protocol

from cospec.core.tree import chain
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import CalibrationSample
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.routing.routing import Feedback, Similarity
from cospec.rng.random_streams import Floats, StreamKind

UNKNOWN = 0.5  # the raw confidence of a drafter without confidences


class ConfidenceCalibration(Protocol):
    """Calibrates a drafter's confidence."""

    def __call__(self, member: int, raw: float, rank: int = 0) -> float:
        """Return the probability that a token is committed given its parent; ``rank`` 1 is a second choice."""


class CandidateSet(Protocol):
    """One drafter's candidates for one sequence in one step, kept until the tokens are known."""

    def verify(self, committed: Sequence[int], similarity: Similarity | None = None) -> Feedback:
        """Compare the candidates with the committed tokens, and by ``similarity`` where the routing compares."""


@dataclass(slots=True)
class CombineTask:
    """One sequence to draft for.

    Attributes:
        budget: of the combined draft.
        weights: ``[M]``, of the drafters that take part, with sum 1; 0 for the others.
        steppers: drafters that run in lockstep.
        calibrate: calibrated confidence for this request.
        odds: ``[M]``, factors of the drafters' odds for this request, which ``calibrate`` applies.
        drafts: whole drafts by drafter; filled by the pool before the combiner is called.
        candidate_sets: candidates by drafter; filled by the pool and the combiner.
        distinct: number of different tokens of all whole drafts; counted by combiners that gather.
    """

    context: DraftContext
    budget: DraftBudget
    weights: Sequence[float]
    steppers: tuple[int, ...]
    calibrate: ConfidenceCalibration
    drafts: dict[int, Draft] = field(default_factory=dict)
    odds: Sequence[float] = ()
    candidate_sets: dict[int, CandidateSet] = field(default_factory=dict)
    distinct: int = 0

    @property
    def base(self) -> int:
        """Number of committed tokens."""
        return len(self.context.tokens)

    def confidences(self, member: int) -> list[float]:
        """Return the calibrated confidences of a whole draft's nodes."""
        draft = self.drafts[member]
        if draft.confidence is None:
            return [self.calibrate(member, UNKNOWN)] * len(draft.tokens)
        return [self.calibrate(member, raw) for raw in draft.confidence.tolist()]


class Combiner(ABC):
    """Makes one draft per sequence.

    A draft whose tokens were chosen by comparing drawn values follows no known distribution, so it has no q. Only an
    acceptance method with the target's own random stream may verify this draft; ``stream_kinds`` declares the streams.
    A combiner that draws from a distribution of its own draws with ``session.draw``.
    """

    name: ClassVar[str]
    stream_kinds: ClassVar[frozenset[StreamKind]]  # of the acceptance methods that may verify its drafts
    is_stepwise: ClassVar[bool]  # runs stepwise drafters in lockstep, instead of requesting whole drafts
    gathers: ClassVar[bool]  # every draft adds to the verified tokens, so a draft's value is its new tokens
    branches: ClassVar[bool]  # accepts and makes drafts that branch
    follows_heaviest: ClassVar[bool] = False  # the draft is the heaviest drafter's where others have less weight in all
    confident: ClassVar[bool]  # compares confidences of whole drafts, so computing them is worthwhile

    @abstractmethod
    def combine(self, tasks: Sequence[CombineTask], session: LockstepSession, names: Sequence[str]) -> list[Draft]:
        """Return one draft for each task with candidates."""


@dataclass(slots=True)
class VerifiedCandidates:
    """A chain that native code drafted and verified; only counts are known.

    Attributes:
        accepted, proposed: tokens of the chain.
        rejected: whether a token was wrong.
    """

    accepted: int
    rejected: bool
    proposed: int

    def verify(self, committed: Sequence[int], similarity: Similarity | None = None) -> Feedback:
        """Return the counts; no routing that compares has such candidates."""
        samples = [(UNKNOWN, 1.0)] * self.accepted + [(UNKNOWN, 0.0)] * self.rejected
        return Feedback(self.accepted, self.accepted + self.rejected, self.proposed, samples)


@dataclass(slots=True)
class DraftCandidates:
    """A whole draft."""

    draft: Draft

    def verify(self, committed: Sequence[int], similarity: Similarity | None = None) -> Feedback:
        """Verify every node whose parent was committed; a position is right if any of its nodes is right."""
        draft, node, hits, seen = self.draft, -1, 0, 0
        if draft.parents == chain(len(draft.tokens)):
            return self._verify_chain(committed, similarity)
        children_of: dict[int, list[int]] = {}
        for child, parent in enumerate(draft.parents):
            children_of.setdefault(parent, []).append(child)
        raw = self._raw()
        samples: list[CalibrationSample] = []
        pairs: list[tuple[int, int]] = []
        for token in committed:
            if node not in children_of:
                break
            seen += 1
            right = None
            for child in children_of[node]:
                same = draft.tokens[child] == token
                samples.append((raw[child], float(same)))
                pairs.append((draft.tokens[child], token))
                if same and right is None:
                    right = child
            if right is None:
                break
            node = right
            hits += 1
        return Feedback(hits, seen, draft.depth, samples, similarities=_similarities(pairs, similarity))

    def _verify_chain(self, committed: Sequence[int], similarity: Similarity | None) -> Feedback:
        tokens, samples, wrong = self.draft.tokens, list[CalibrationSample](), 0
        for confidence, token, right in zip(self._raw(), tokens, committed, strict=False):
            samples.append((confidence, float(token == right)))
            if token != right:
                wrong = 1
                break
        found = _similarities(islice(zip(tokens, committed, strict=False), len(samples)), similarity)
        return Feedback(len(samples) - wrong, len(samples), len(tokens), samples, similarities=found)

    def _raw(self) -> list[float]:
        draft = self.draft
        return [UNKNOWN] * len(draft.tokens) if draft.confidence is None else draft.confidence.tolist()


class Candidate(NamedTuple):
    """One drafter's proposal at one position.

    Attributes:
        token: the chosen token, or the token that would be drawn; -1 for a distribution without a draw.
        confidence: raw.
        q: ``[V]``, if the drafter gives a distribution instead of a token.
        second: the second choice and its raw confidence.
    """

    token: int
    confidence: float
    q: Floats | None = None
    second: tuple[int, float] | None = None

    def chance(self, token: int) -> float:
        """Return the probability of proposing ``token``."""
        return float(self.token == token) if self.q is None else float(self.q[token])


@dataclass(slots=True)
class StepCandidates:
    """Candidates along a path that all drafters shared.

    Attributes:
        path: the shared tokens; grows during drafting.
        candidates: one per position from the first on; each follows the path up to its position.
    """

    path: Sequence[int]
    candidates: list[Candidate] = field(default_factory=list)

    def verify(self, committed: Sequence[int], similarity: Similarity | None = None) -> Feedback:
        """Verify the candidates up to the first committed token that differs from the path.

        A right token counts 1, a wrong token 0, a distribution without a draw the committed token's probability.
        """
        path, hits = self.path, 0.0
        samples, second_samples = list[CalibrationSample](), list[CalibrationSample]()
        for place, ((token, confidence, q, second), right) in enumerate(zip(self.candidates, committed, strict=False)):
            value = float(token == right) if q is None or token >= 0 else float(q[right])
            hits += value
            samples.append((confidence, value))
            if second is not None:
                second_samples.append((second[1], float(second[0] == right)))
            if place >= len(path) or path[place] != right:
                break
        found: Sequence[float] = ()
        if similarity is not None and all([each.token >= 0 for each in self.candidates]):  # else they are distributions
            tokens = [each.token for each in self.candidates]
            found = _similarities(islice(zip(tokens, committed, strict=False), len(samples)), similarity)
        return Feedback(hits, len(samples), len(self.candidates), samples, tuple(second_samples), found)


def _similarities(pairs: Iterable[tuple[int, int]], similarity: Similarity | None) -> Sequence[float]:
    return () if similarity is None else [similarity(token, right) for token, right in pairs]


def confidence_of(draft: Draft, node: int) -> float:
    """Return the drafter's own confidence in a node."""
    return UNKNOWN if draft.confidence is None else float(draft.confidence[node])
