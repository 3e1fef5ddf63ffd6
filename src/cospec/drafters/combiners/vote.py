"""The path that the weighted majority of drafters goes (Minions section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from cospec.drafters.combiners.job import Job
from cospec.drafters.combiners.merging import Merged, merge
from cospec.drafters.combiners.session import Session
from cospec.draws import Purpose
from cospec.types import Draft


class Vote:
    """Walks down the heaviest child; only that path is verified, so it costs the target no more than one chain.

    Ties go to the heavier drafter's token, whose draft was merged first. The weights are the pool's, which every
    drafter's agreement with the committed tokens moves, not only that of the one whose path was verified.
    """

    name: ClassVar[str] = "vote"
    noises: ClassVar[frozenset[Purpose]] = frozenset({Purpose.TARGET})
    steps: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    confident: ClassVar[bool] = False

    def combine(self, jobs: Seq[Job], session: Session, names: Seq[str]) -> list[Draft]:
        """A chain for each job."""
        drafts = []
        for job in jobs:
            merged = merge(job)
            path = _heaviest(merged)[: min(job.budget.max_nodes, job.budget.depth)]
            drafts.append(merged.tree.draft(job.context, path, names))
        return [draft for draft in drafts if draft is not None]


def _heaviest(merged: Merged) -> list[int]:
    """Nodes from the root to a leaf. Parents come first, so one pass finds every node's heaviest child."""
    follower: dict[int, int] = {}
    for node, parent in enumerate(merged.tree.parents):
        rival = follower.get(parent)
        if rival is None or merged.weights[node] > merged.weights[rival]:
            follower[parent] = node
    path, node = [], -1
    while node in follower:
        node = follower[node]
        path.append(node)
    return path
