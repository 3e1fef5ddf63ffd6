"""Merge all drafts into one tree, which is verified as a whole (SpecInfer)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cospec.core.types import Draft
from cospec.drafters.pool.combiners.combiner import Combiner, CombineTask
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.tree_builder import TreeBuilder
from cospec.rng.random_streams import StreamKind


class Union(Combiner):
    """``union``: the nodes with the highest weight times confidence within the budget."""

    name: ClassVar[str] = "union"
    stream_kinds: ClassVar[frozenset[StreamKind]] = frozenset({StreamKind.TARGET})
    is_stepwise: ClassVar[bool] = False
    gathers: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    confident: ClassVar[bool] = False

    def combine(self, tasks: Sequence[CombineTask], session: LockstepSession, names: Sequence[str]) -> list[Draft]:
        """Return a tree for each task."""
        drafts = []
        for task in tasks:
            tree = merged(task)
            task.distinct = len(tree.tokens)
            drafts.append(tree.draft(task.context, tree.best(task.budget.max_nodes), names))
        return [draft for draft in drafts if draft is not None]


def merged(task: CombineTask) -> TreeBuilder:
    """Merge all whole drafts; the heaviest drafter comes first and owns shared nodes.

    A node's score is the sum of weight times path confidence over the drafters whose draft contains the node.
    """
    tree = TreeBuilder()
    for member in sorted(task.drafts, key=lambda each: (-task.weights[each], each)):
        draft = task.drafts[member]
        place, share = [-1], [task.weights[member]]  # of the root, then of the draft's nodes
        for token, parent, confidence in zip(draft.tokens, draft.parents, task.confidences(member), strict=True):
            node = tree.put(place[parent + 1], token, member, 0.0, confidence)
            if confidence > tree.confidence[node]:
                tree.confidence[node] = confidence
            place.append(node)
            share.append(share[parent + 1] * confidence)
            tree.scores[node] += share[-1]
    return tree
