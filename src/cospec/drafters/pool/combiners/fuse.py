"""One shared path of the most confident tokens; other drafters' tokens become sibling leaves (CoSine 4.2, eq. 4).

The paper continues from the fused token and from each drafter's own token, which doubles its branches at every step.
Here all drafters continue from the fused token alone. The other drafters' proposals, and the winner's second choice,
become sibling leaves. A whole draft that leaves the path keeps its tail. The tree is cut to the node budget by path
probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cospec.core.types import Draft
from cospec.drafters.pool.candidates import top_candidates
from cospec.drafters.pool.combiners.combiner import Combiner, CombineTask
from cospec.drafters.pool.lockstep import LockstepPath, MemberCandidate, run_lockstep
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.tree_builder import TreeBuilder
from cospec.native import pool_lockstep
from cospec.rng.random_streams import StreamKind


@dataclass(slots=True)
class FusedTree:
    """The tree around one path."""

    path: LockstepPath
    tree: TreeBuilder = field(default_factory=TreeBuilder)
    node: int = -1  # the end of the path
    # whole drafts that left the path, and their leaf
    tails: list[tuple[MemberCandidate, int]] = field(default_factory=list)

    def advance(self) -> None:
        """Extend the path by the most confident token; calibration makes confidences comparable."""
        path, task = self.path, self.path.task
        calibrated = [(task.calibrate(each.member, each.candidate.confidence), each) for each in path.candidates]
        chance, best = calibrated[0]
        for rival in calibrated[1:]:
            if rival[0] > chance or (rival[0] == chance and task.weights[rival[1].member] > task.weights[best.member]):
                chance, best = rival
        if path.chance * chance < task.budget.threshold:
            path.active = False
            return
        parent, before = self.node, path.chance
        self.node = self.tree.put(parent, best.candidate.token, best.member, before * chance, chance)
        for confidence, candidate in calibrated:
            if candidate.candidate.token != best.candidate.token:
                # Right only if the path is wrong, so never more probable than a wrong path.
                self._leaf(parent, candidate, min(confidence, 1.0 - chance), before)
        if best.candidate.second is not None:
            token, raw = best.candidate.second
            confidence = min(task.calibrate(best.member, raw, 1), 1.0 - chance)
            self.tree.put(parent, token, best.member, before * confidence, confidence)
        path.advance(best.candidate.token, chance)
        if self.tree.outranked(self.node) >= task.budget.max_nodes:
            path.active = False  # nodes after a cut node would be cut too

    def _leaf(self, parent: int, candidate: MemberCandidate, confidence: float, before: float) -> None:
        leaf = self.tree.put(parent, candidate.candidate.token, candidate.member, before * confidence, confidence)
        if candidate.node is not None:
            self.tails.append((candidate, leaf))

    def finish(self, names: Sequence[str]) -> Draft | None:
        """Return the tree with the tails, cut to the budget."""
        task = self.path.task
        for candidate, leaf in self.tails:
            self._tail(candidate, leaf)
        return self.tree.draft(task.context, self.tree.best(task.budget.max_nodes), names)

    def _tail(self, candidate: MemberCandidate, leaf: int) -> None:
        draft, tree, member = self.path.task.drafts[candidate.member], self.tree, candidate.member
        assert candidate.node is not None, "only whole drafts have tails"
        place, confidences = {candidate.node: leaf}, self.path.task.confidences(member)
        for node in range(candidate.node + 1, len(draft)):
            parent = place.get(draft.parents[node])
            if parent is not None:
                score = tree.scores[parent] * confidences[node]
                place[node] = tree.put(parent, draft.tokens[node], member, score, confidences[node])


class Fuse(Combiner):
    """``fuse``."""

    name: ClassVar[str] = "fuse"
    stream_kinds: ClassVar[frozenset[StreamKind]] = frozenset({StreamKind.TARGET})
    is_stepwise: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    branches: ClassVar[bool] = True
    confident: ClassVar[bool] = True

    def combine(self, tasks: Sequence[CombineTask], session: LockstepSession, names: Sequence[str]) -> list[Draft]:
        """Return a tree for each task."""
        if not pool_lockstep.why_not(session, tasks):
            return pool_lockstep.combine(session, tasks, names, branches=True, mixes=False)
        fusions = [FusedTree(LockstepPath(task)) for task in tasks]
        run_lockstep(fusions, session, top_candidates, _advance)
        drafts = [fusion.finish(names) for fusion in fusions]
        return [draft for draft in drafts if draft is not None]


def _advance(fusions: Sequence[FusedTree]) -> None:
    for fusion in fusions:
        fusion.advance()
