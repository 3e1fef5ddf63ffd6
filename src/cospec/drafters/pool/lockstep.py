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
from cospec.drafters.pool.combiners.combiner import (
    Candidate,
    CombineTask,
    StepCandidates,
    confidence_of,
)
from cospec.drafters.pool.lockstep_session import LockstepSession

Read = Callable[[Tensor, Sequence[DraftContext], Sequence[Sequence[int]]], list[Candidate | None]]


class MemberCandidate(NamedTuple):
    """One drafter's candidate at the current position of a path.

    Attributes:
        node: the node of the drafter's whole draft, if there is one.
    """

    member: int
    candidate: Candidate
    node: int | None = None


@dataclass(slots=True)
class LockstepPath:
    """One shared path.

    Attributes:
        tokens: the tokens of the path.
        chance: estimated probability that the whole path is accepted.
        candidates: candidates at the current position, drafters in ascending order, lockstep drafters first.
        found: candidates of the lockstep drafters so far.
        follows: the node of each whole draft at the end of the path, while the path follows the draft.
        depth: maximum length of the path.
    """

    task: CombineTask
    tokens: list[int] = field(default_factory=list)
    active: bool = True
    chance: float = 1.0
    candidates: list[MemberCandidate] = field(default_factory=list)
    found: dict[int, StepCandidates] = field(default_factory=dict)
    follows: dict[int, int] = field(default_factory=dict)
    depth: int = 0

    def __post_init__(self) -> None:
        self.follows = dict.fromkeys(sorted(self.task.drafts), -1)
        self.found = {member: StepCandidates(self.tokens) for member in self.task.steppers}
        self.task.candidate_sets.update(self.found)
        self.depth = min(self.task.budget.depth, self.task.budget.max_nodes)

    def add_candidate(self, member: int, candidate: Candidate) -> None:
        """Add the candidate of a lockstep drafter, and store the candidate for feedback."""
        self.candidates.append(MemberCandidate(member, candidate))
        found = self.found[member].candidates
        if len(found) == len(self.tokens):  # otherwise an earlier position had no finite logits
            found.append(candidate)

    def add_draft_candidates(self) -> None:
        """Add the candidates of the whole drafts that the path has followed so far."""
        for member, node in self.follows.items():
            draft = self.task.drafts[member]
            for child in children(draft.parents, node):
                candidate = Candidate(draft.tokens[child], confidence_of(draft, child))
                self.candidates.append(MemberCandidate(member, candidate, child))

    def advance(self, token: int, chance: float) -> None:
        """Extend the path by ``token`` with confidence ``chance``; whole drafts with another token drop out."""
        self.tokens.append(token)
        self.chance *= chance
        follows = dict[int, int]()
        if self.follows:
            for member, candidate, node in self.candidates:
                if node is not None and candidate.token == token:
                    follows.setdefault(member, node)
        self.follows, self.candidates = follows, []
        self.active = len(self.tokens) < self.depth


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
        read: turns logits into candidates.
        advance: extends each given path with ``LockstepPath.advance``, or ends the path.
    """
    paths = [builder.path for builder in builders]
    contexts = [path.task.context for path in paths]
    session.open(contexts, [path.depth for path in paths], taking([path.task for path in paths]))
    while True:
        for member, (rows, _, logits) in session.logits.items():
            given = [contexts[row] for row in rows], [paths[row].tokens for row in rows]
            for row, candidate in zip(rows, session.timed(read, logits, *given), strict=True):
                if candidate is not None:
                    paths[row].add_candidate(member, candidate)
        for member, answers in session.candidates.items():
            for row, candidate in answers.items():
                paths[row].add_candidate(member, candidate)
        for path in paths:
            if path.active:
                if path.follows:
                    path.add_draft_candidates()
                path.active = bool(path.candidates)
        advance([builder for builder in builders if builder.path.active])
        fed = {row: path.tokens[-1] for row, path in enumerate(paths) if path.active}
        if not fed:
            return
        session.feed(fed)


def taking(tasks: Sequence[CombineTask]) -> dict[int, list[int]]:
    """Return the rows of the sequences that each lockstep drafter takes part in, drafters in ascending order."""
    found: dict[int, list[int]] = {}
    for row, task in enumerate(tasks):
        for member in task.steppers:
            found.setdefault(member, []).append(row)
    return dict(sorted(found.items()))
