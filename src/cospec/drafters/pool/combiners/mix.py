"""Draw each token from the weighted mixture of all drafters' distributions, which is stored as q.

The mixture is exact under every acceptance method, because it is a function of the preceding tokens. A drafter's share
is its weight times its calibrated confidence at this position. Its distribution is the request's distribution under
the drafter; a greedy request's is a point mass, so mixing becomes a vote. A drafter that chooses its tokens is a point
mass as long as the path follows its draft. A drafter that draws a whole draft cannot take part, because its token
does not reveal its distribution. Drafters gain weight by tokens that they would have drafted alone, not by the tokens'
probabilities: tokens that are probable for all drafters distinguish no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from cospec.core.tree import chain
from cospec.core.types import Draft
from cospec.drafters.pool.candidates import distributions
from cospec.drafters.pool.combiners.combiner import Combiner, CombineTask
from cospec.drafters.pool.lockstep import LockstepPath, run_lockstep
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.routing.drafter_weights import total
from cospec.native import pool_lockstep
from cospec.rng.random_streams import Floats, StreamKind


@dataclass(slots=True)
class _Mixture:
    """One chain."""

    path: LockstepPath
    owners: list[int] = field(default_factory=list)
    q: list[Floats] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the candidates at the current position

    def weigh(self, mixture: Floats) -> float:
        """Fill in the mixture ``[V]`` at the current position; returns the acceptance probability of its tokens.

        A share is weight times calibrated confidence. Both are known before any draw, so the mixture is q.
        """
        task, candidates = self.path.task, self.path.candidates
        chances = [task.calibrate(member, candidate.confidence) for member, candidate, _ in candidates]
        parts = [task.weights[each.member] * chance for each, chance in zip(candidates, chances, strict=True)]
        sum_ = total(parts)
        self.shares = [part / sum_ for part in parts]
        mixture[:] = 0.0
        for share, (_, candidate, _) in zip(self.shares, candidates, strict=True):
            if candidate.q is None:
                mixture[candidate.token] += share
            else:
                mixture += share * candidate.q
        return total(share * chance for share, chance in zip(self.shares, chances, strict=True))

    def append(self, token: int, mixture: Floats, confidence: float) -> None:
        """Append a token drawn from the mixture; its source is the drafter with the largest part."""
        task, candidates = self.path.task, self.path.candidates
        parts = [share * each.candidate.chance(token) for share, each in zip(self.shares, candidates, strict=True)]
        self.owners.append(candidates[parts.index(max(parts))].member)
        self.confidence.append(confidence)
        if task.context.stream_kind is StreamKind.DRAFT and not task.context.sampling.greedy:
            self.q.append(mixture)
        self.path.advance(token, confidence)

    def finish(self, names: Sequence[str]) -> Draft | None:
        """Return the chain with its q."""
        context, tokens = self.path.task.context, tuple(self.path.tokens)
        if not tokens:
            return None
        owners = tuple(names[owner] for owner in self.owners)
        q = np.stack(self.q) if self.q else None
        return Draft(context.id, self.path.task.base, tokens, chain(len(tokens)), owners, q, np.array(self.confidence))


class Mix(Combiner):
    """``mix``; greedy requests take the mixture's most probable token."""

    name: ClassVar[str] = "mix"
    stream_kinds: ClassVar[frozenset[StreamKind]] = frozenset({StreamKind.TARGET, StreamKind.DRAFT})
    is_stepwise: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    confident: ClassVar[bool] = True

    def combine(self, tasks: Sequence[CombineTask], session: LockstepSession, names: Sequence[str]) -> list[Draft]:
        """Return a chain for each task."""
        if not pool_lockstep.why_not(session, tasks):
            return pool_lockstep.combine(session, tasks, names, branches=False, mixes=True)
        mixtures = [_Mixture(LockstepPath(task)) for task in tasks]
        run_lockstep(mixtures, session, distributions, partial(_advance, session))
        drafts = [mixture.finish(names) for mixture in mixtures]
        return [draft for draft in drafts if draft is not None]


def _advance(session: LockstepSession, mixtures: Sequence[_Mixture]) -> None:
    """Decide which chains continue before any token is drawn; then draw all tokens of the position in one call."""
    rows = np.empty((len(mixtures), session.vocab_size))
    confidences = [mixture.weigh(row) for mixture, row in zip(mixtures, rows, strict=True)]
    chosen: dict[int, int] = {}
    drawing: list[int] = []
    for place, (mixture, confidence) in enumerate(zip(mixtures, confidences, strict=True)):
        path = mixture.path
        if path.chance * confidence < path.task.budget.threshold:
            path.active = False
        elif path.task.context.sampling.greedy:
            chosen[place] = int(rows[place].argmax())
        else:
            drawing.append(place)
    if drawing:
        contexts = [mixtures[place].path.task.context for place in drawing]
        ahead = [len(mixtures[place].path.tokens) for place in drawing]
        weights = rows if len(drawing) == len(rows) else rows[drawing]
        chosen.update(zip(drawing, session.timed(session.draw, weights, contexts, ahead), strict=True))
    for place, token in chosen.items():
        mixtures[place].append(token, rows[place], confidences[place])
