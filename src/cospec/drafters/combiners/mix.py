"""Each token drawn from the weighted mixture of all drafters' distributions, which is kept as q.

Voting that stays exact under every rule: the mixture is a function of the tokens before it, whoever is in it. A
drafter's share is its weight times its calibrated confidence at that position. Its distribution is the request's law as
it sees it, so that of a greedy request is a point mass, and mixing is a vote. One that chooses its tokens by itself is
in it as a point mass while its draft goes the same way; one that draws a whole draft by itself cannot be, because its
token alone does not tell its distribution. Drafters gain weight by tokens that they would have drafted alone, not by
the probability that they gave them: what is probable to everybody tells nobody apart.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from cospec.drafters.combiners.job import Combiner, Job
from cospec.drafters.combiners.leading import Line, lead
from cospec.drafters.combiners.reading import distributions, draw
from cospec.drafters.combiners.session import Session
from cospec.drafters.routing.standing import total
from cospec.draws import Floats, Purpose
from cospec.types import Draft


@dataclass(slots=True)
class _Mixture:
    """One chain."""

    line: Line
    owners: list[int] = field(default_factory=list)
    q: list[Floats] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the voices at the present position

    def weigh(self, mixture: Floats) -> float:
        """Fill in the mixture ``[V]`` at the present position; returns how likely its tokens are to be kept.

        A share is weight times calibrated confidence, both known before anything is drawn, so the mixture is q.
        """
        job, voices = self.line.job, self.line.voices
        trusts = [job.trust(voice.member, voice.guess.confidence) for voice in voices]
        parts = [job.weights[voice.member] * trust for voice, trust in zip(voices, trusts, strict=True)]
        sum_ = total(parts)
        self.shares = [part / sum_ for part in parts]
        mixture[:] = 0.0
        for share, voice in zip(self.shares, voices, strict=True):
            if voice.guess.q is None:
                mixture[voice.guess.token] += share
            else:
                mixture += share * voice.guess.q
        return total(share * trust for share, trust in zip(self.shares, trusts, strict=True))

    def take(self, token: int, mixture: Floats, confidence: float) -> None:
        """The token that the mixture gave; it is said to come from the drafter with the largest part in it."""
        job, voices = self.line.job, self.line.voices
        parts = [share * voice.guess.chance(token) for share, voice in zip(self.shares, voices, strict=True)]
        self.owners.append(voices[parts.index(max(parts))].member)
        self.confidence.append(confidence)
        if job.context.noise is Purpose.DRAFT and not job.context.sampling.greedy:
            self.q.append(mixture)
        self.line.advance(token, confidence)

    def finish(self, names: Seq[str]) -> Draft | None:
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
    noises: ClassVar[frozenset[Purpose]] = frozenset({Purpose.TARGET, Purpose.DRAFT})
    steps: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    native_id: ClassVar[int | None] = 3
    confident: ClassVar[bool] = True

    def combine(self, jobs: Seq[Job], session: Session, names: Seq[str]) -> list[Draft]:
        """A chain for each job."""
        mixtures = [_Mixture(Line(job)) for job in jobs]
        lead(mixtures, session, distributions, partial(_advance, session))
        drafts = [mixture.finish(names) for mixture in mixtures]
        return [draft for draft in drafts if draft is not None]


def _advance(session: Session, mixtures: Seq[_Mixture]) -> None:
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
