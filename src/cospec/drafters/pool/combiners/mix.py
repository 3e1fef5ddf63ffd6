"""Each token drawn from the weighted mixture of all drafters' distributions, which is kept as q.

Voting that stays exact under every rule: the mixture is a function of the tokens before it, whoever is in it. A
drafter's share is its weight times its calibrated confidence at that position. Its distribution is the request's law as
it sees it, so that of a greedy request is a point mass, and mixing is a vote. One that chooses its tokens by itself is
in it as a point mass while its draft goes the same way; one that draws a whole draft by itself cannot be, because its
token alone does not tell its distribution. Drafters gain weight by tokens that they would have drafted alone, not by
the probability that they gave them: what is probable to everybody tells nobody apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from cospec.core.rng import Floats, StreamKind
from cospec.core.types import Draft
from cospec.drafters.pool.candidates import distributions, draw
from cospec.drafters.pool.combiners.combine import Combiner, CombineTask
from cospec.drafters.pool.lockstep import LockstepPath, lead
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.routing.weights import total


@dataclass(slots=True)
class _Mixture:
    """One chain."""

    line: LockstepPath
    owners: list[int] = field(default_factory=list)
    q: list[Floats] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the voices at the present position

    def weigh(self, mixture: Floats) -> float:
        """Fill in the mixture ``[V]`` at the present position; returns how likely its tokens are to be kept.

        A share is weight times calibrated confidence, both known before anything is drawn, so the mixture is q.
        """
        job, candidates = self.line.job, self.line.candidates
        trusts = [job.trust(candidate.member, candidate.guess.confidence) for candidate in candidates]
        parts = [job.weights[candidate.member] * trust for candidate, trust in zip(candidates, trusts, strict=True)]
        sum_ = total(parts)
        self.shares = [part / sum_ for part in parts]
        mixture[:] = 0.0
        for share, candidate in zip(self.shares, candidates, strict=True):
            if candidate.guess.q is None:
                mixture[candidate.guess.token] += share
            else:
                mixture += share * candidate.guess.q
        return total(share * trust for share, trust in zip(self.shares, trusts, strict=True))

    def take(self, token: int, mixture: Floats, confidence: float) -> None:
        """The token that the mixture gave; it is said to come from the drafter with the largest part in it."""
        job, candidates = self.line.job, self.line.candidates
        parts = [
            share * candidate.guess.chance(token) for share, candidate in zip(self.shares, candidates, strict=True)
        ]
        self.owners.append(candidates[parts.index(max(parts))].member)
        self.confidence.append(confidence)
        if job.context.stream_kind is StreamKind.DRAFT and not job.context.sampling.greedy:
            self.q.append(mixture)
        self.line.advance(token, confidence)

    def finish(self, names: Sequence[str]) -> Draft | None:
        """The chain with its q."""
        context, tokens = self.line.job.context, tuple(self.line.spine)
        if not tokens:
            return None
        owners = tuple(names[owner] for owner in self.owners)
        q = np.stack(self.q) if self.q else None
        parents = tuple(range(-1, len(tokens) - 1))
        return Draft(context.id, self.line.job.base, tokens, parents, owners, q, np.array(self.confidence))


class Mix(Combiner):
    """Spec section 4, ``mix``; the heaviest token of the mixture for greedy requests."""

    name: ClassVar[str] = "mix"
    stream_kinds: ClassVar[frozenset[StreamKind]] = frozenset({StreamKind.TARGET, StreamKind.DRAFT})
    steps: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    native_id: ClassVar[int | None] = 3
    confident: ClassVar[bool] = True

    def combine(self, jobs: Sequence[CombineTask], session: LockstepSession, names: Sequence[str]) -> list[Draft]:
        """A chain for each job."""
        mixtures = [_Mixture(LockstepPath(job)) for job in jobs]
        lead(mixtures, session, distributions, partial(_advance, session))
        drafts = [mixture.finish(names) for mixture in mixtures]
        return [draft for draft in drafts if draft is not None]


def _advance(session: LockstepSession, mixtures: Sequence[_Mixture]) -> None:
    """Whether to go on is decided before the token is drawn; then all draws of the position are one call."""
    rows = np.empty((len(mixtures), session.vocab_size))
    confidences = [mixture.weigh(row) for mixture, row in zip(mixtures, rows, strict=True)]
    chosen: dict[int, int] = {}
    drawing: list[int] = []
    for place, (mixture, confidence) in enumerate(zip(mixtures, confidences, strict=True)):
        line = mixture.line
        if line.chance * confidence < line.job.budget.threshold:
            line.going = False
        elif line.job.context.sampling.greedy:
            chosen[place] = int(rows[place].argmax())
        else:
            drawing.append(place)
    if drawing:
        contexts = [mixtures[place].line.job.context for place in drawing]
        ahead = [len(mixtures[place].line.spine) for place in drawing]
        weights = rows if len(drawing) == len(rows) else rows[drawing]
        chosen.update(zip(drawing, session.timed(draw, weights, contexts, ahead), strict=True))
    for place, token in chosen.items():
        mixtures[place].take(token, rows[place], confidences[place])
