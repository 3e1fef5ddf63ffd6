"""Follow the path of the weighted majority of drafters (Minions section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from cospec.core.tree import chain
from cospec.core.types import Draft
from cospec.drafters.pool.combiners.combiner import Combiner, CombineTask
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.rng.random_streams import StreamKind


class Vote(Combiner):
    """Descends to the heaviest child; only this path is verified, so the target's cost is that of one chain.

    No tree is built: only drafts with the chosen token continue after this token. Ties go to the heavier drafter's
    token. Every drafter's agreement with the committed tokens updates the pool's weights, not only that of the verified
    path. In the paper only the drafter of the verified path learns, so a drafter that never wins a vote cannot regain
    weight. The committed tokens judge the other drafts too.
    """

    name: ClassVar[str] = "vote"
    stream_kinds: ClassVar[frozenset[StreamKind]] = frozenset({StreamKind.TARGET})
    is_stepwise: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    follows_heaviest: ClassVar[bool] = True
    confident: ClassVar[bool] = False

    def combine(self, tasks: Sequence[CombineTask], session: LockstepSession, names: Sequence[str]) -> list[Draft]:
        """Return a chain for each task."""
        return [_majority_path(task, names) for task in tasks if task.drafts]


def _majority_path(task: CombineTask, names: Sequence[str]) -> Draft:
    weights, most = task.weights, min(task.budget.max_nodes, task.budget.depth)
    members = sorted(task.drafts, key=lambda member: (-weights[member], member))
    texts = {member: task.drafts[member].tokens[:most] for member in members}
    confidences = {member: task.confidences(member) for member in members}
    tokens: list[int] = []
    owners: list[str] = []
    confidence: list[float] = []
    while len(members) > 1:
        place, votes = len(tokens), dict[int, float]()
        for member in members:
            token = texts[member][place]
            votes[token] = votes.get(token, 0.0) + weights[member]
        tokens.append(max(votes, key=votes.__getitem__))
        members = [member for member in members if texts[member][place] == tokens[-1]]
        owners.append(names[members[0]])
        confidence.append(max([confidences[member][place] for member in members]))
        members = [member for member in members if len(texts[member]) > place + 1]
    for member in members:  # a single remaining drafter completes the chain
        rest = texts[member][len(tokens) :]
        confidence += confidences[member][len(tokens) : most]
        owners += [names[member]] * len(rest)
        tokens += rest
    return Draft(
        task.context.id, task.base, tuple(tokens), chain(len(tokens)), tuple(owners), confidence=np.array(confidence)
    )
