"""Run drafters along one shared path per sequence (CoSine algorithm 1, lines 15 to 19).

At each position all drafters contribute candidates: lockstep drafters by their logits, whole drafts as long as the
path follows them. The combiner then extends every path by a token, and all lockstep drafters are fed this token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from cospec.core.tree import children
from cospec.core.types import DraftContext
from cospec.drafters.pool.combiners.combine import (
    Candidate,
    CombineTask,
    StepCandidates,
    confidence_of,
)
from cospec.drafters.pool.lockstep_session import LockstepSession

Read = Callable[[Tensor, Sequence[DraftContext], Sequence[Sequence[int]]], list[Candidate | None]]


class MemberCandidate(NamedTuple):
    """One drafter's guess at the current position of a path.

    Attributes:
        node: the node of the drafter's whole draft, if there is one.
    """

    member: int
    guess: Candidate
    node: int | None = None


@dataclass(slots=True)
class LockstepPath:
    """One shared path.

    Attributes:
        spine: the tokens of the path.
        chance: estimated probability that the whole path is accepted.
        candidates: guesses at the current position.
        slates: guesses of the lockstep drafters so far.
        follows: the node of each whole draft at the end of the path, while the path follows the draft.
        depth: maximum length of the path.
    """

    job: CombineTask
    spine: list[int] = field(default_factory=list)
    active: bool = True
    chance: float = 1.0
    candidates: list[MemberCandidate] = field(default_factory=list)
    slates: dict[int, StepCandidates] = field(default_factory=dict)
    follows: dict[int, int] = field(default_factory=dict)
    depth: int = 0

    def __post_init__(self) -> None:
        self.follows = dict.fromkeys(sorted(self.job.drafts), -1)
        self.slates = {member: StepCandidates(self.spine) for member in self.job.steppers}
        self.job.slates.update(self.slates)
        self.depth = min(self.job.budget.depth, self.job.budget.max_nodes)

    def add_candidate(self, member: int, guess: Candidate) -> None:
        """Add the guess of a lockstep drafter, and store it for feedback."""
        self.candidates.append(MemberCandidate(member, guess))
        guesses = self.slates[member].guesses
        if len(guesses) == len(self.spine):  # otherwise an earlier position had no finite logits
            guesses.append(guess)

    def add_draft_candidates(self) -> None:
        """Add the guesses of the whole drafts that the path has followed so far."""
        for member, node in self.follows.items():
            draft = self.job.drafts[member]
            for child in children(draft.parents, node):
                self.candidates.append(
                    MemberCandidate(member, Candidate(draft.tokens[child], confidence_of(draft, child)), child)
                )

    def advance(self, token: int, chance: float) -> None:
        """Extend the path by ``token`` with confidence ``chance``; whole drafts with another token drop out."""
        self.spine.append(token)
        self.chance *= chance
        self.follows = {}
        for candidate in self.candidates:
            if candidate.node is not None and candidate.guess.token == token:
                self.follows.setdefault(candidate.member, candidate.node)
        self.candidates = []
        self.active = len(self.spine) < self.depth


class PathBuilder(Protocol):
    """Builds a draft around a path."""

    @property
    def path(self) -> LockstepPath:
        """The path."""


PathBuilderT = TypeVar("PathBuilderT", bound=PathBuilder)


def run_lockstep(
    builders: Sequence[PathBuilderT],
    session: LockstepSession,
    read: Read,
    advance: Callable[[Sequence[PathBuilderT]], None],
) -> None:
    """Run until all paths are complete.

    Args:
        builders: builders, one per sequence.
        read: turns logits into guesses.
        advance: extends each given path with ``LockstepPath.advance``, or ends the path.
    """
    shared_paths = [builder.path for builder in builders]
    jobs = [path.job for path in shared_paths]
    taking: dict[int, list[int]] = {}
    for row, job in enumerate(jobs):
        for member in job.steppers:
            taking.setdefault(member, []).append(row)
    session.open([job.context for job in jobs], [path.depth for path in shared_paths], dict(sorted(taking.items())))
    while True:
        for member, (rows, _, logits) in session.stands.items():
            contexts, paths = [jobs[row].context for row in rows], [shared_paths[row].spine for row in rows]
            for row, guess in zip(rows, session.timed(read, logits, contexts, paths), strict=True):
                if guess is not None:
                    shared_paths[row].add_candidate(member, guess)
        for path in shared_paths:
            if path.active:
                if path.follows:
                    path.add_draft_candidates()
                path.active = bool(path.candidates)
        advance([builder for builder in builders if builder.path.active])
        fed = {number: path.spine[-1] for number, path in enumerate(shared_paths) if path.active}
        if not fed:
            return
        session.feed(fed)
