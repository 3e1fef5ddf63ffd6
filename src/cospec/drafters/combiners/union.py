"""All drafts in one tree, verified whole (SpecInfer)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from cospec.drafters.combiners.job import Job
from cospec.drafters.combiners.merging import merge
from cospec.drafters.combiners.session import Session
from cospec.draws import Purpose
from cospec.types import Draft


class Union:
    """The nodes that weigh most, by weight times confidence, within the budget. Spec section 4, ``union``."""

    name: ClassVar[str] = "union"
    noises: ClassVar[frozenset[Purpose]] = frozenset({Purpose.TARGET})
    steps: ClassVar[bool] = False
    branches: ClassVar[bool] = True
    confident: ClassVar[bool] = True

    def combine(self, jobs: Seq[Job], session: Session, names: Seq[str]) -> list[Draft]:
        """A tree for each job."""
        drafts = []
        for job in jobs:
            tree = merge(job).tree
            drafts.append(tree.draft(job.context, tree.best(job.budget.max_nodes), names))
        return [draft for draft in drafts if draft is not None]
