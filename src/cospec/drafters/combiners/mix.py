"""Each token drawn from the weighted mixture of all drafters' distributions, which is kept as q.

Voting that stays exact under every rule: the mixture is a function of the tokens before it, whoever is in it. A
drafter's share is its weight times its calibrated confidence at that position. One that chooses
its tokens by itself is in it as a point mass while its draft goes the same way; one that draws a whole draft by itself
cannot be, because its token alone does not tell its distribution.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from cospec.drafters.combiners.job import Job
from cospec.drafters.combiners.leading import Line, lead
from cospec.drafters.combiners.reading import distributions, draw
from cospec.drafters.combiners.session import Session
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

    def weigh(self, vocab_size: int) -> tuple[Floats, float]:
        """The mixture ``[V]`` at the present position, and how likely its tokens are to be kept.

        A share is weight times calibrated confidence, both known before anything is drawn, so the mixture is q.
        """
        job, voices = self.line.job, self.line.voices
        trusts = [job.trust(voice.member, voice.guess.confidence) for voice in voices]
        parts = [job.weights[voice.member] * trust for voice, trust in zip(voices, trusts, strict=True)]
        total, mixture = sum(parts), np.zeros(vocab_size)
        self.shares = [part / total for part in parts]
        for share, voice in zip(self.shares, voices, strict=True):
            if voice.guess.q is None:
                mixture[voice.guess.token] += share
            else:
                mixture += share * voice.guess.q
        return mixture, sum(share * trust for share, trust in zip(self.shares, trusts, strict=True))

    def take(self, token: int, mixture: Floats, confidence: float) -> None:
        """The token that the mixture gave; it is said to come from the drafter with the largest part in it."""
        job, voices = self.line.job, self.line.voices
        parts = [share * voice.guess.value(token) for share, voice in zip(self.shares, voices, strict=True)]
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


class Mix:
    """Spec section 4, ``mix``; the likeliest token of the mixture for greedy requests."""

    name: ClassVar[str] = "mix"
    noises: ClassVar[frozenset[Purpose]] = frozenset({Purpose.TARGET, Purpose.DRAFT})
    steps: ClassVar[bool] = True
    branches: ClassVar[bool] = False

    def combine(self, jobs: Seq[Job], session: Session, names: Seq[str]) -> list[Draft]:
        """A chain for each job."""
        mixtures = [_Mixture(Line(job)) for job in jobs]
        lead(mixtures, session, distributions, partial(_advance, session))
        drafts = [mixture.finish(names) for mixture in mixtures]
        return [draft for draft in drafts if draft is not None]


def _advance(session: Session, mixtures: Seq[_Mixture]) -> None:
    """Whether to go on is decided before the token is drawn; then all draws of the position are one call."""
    going: list[tuple[_Mixture, Floats, float]] = []
    for mixture in mixtures:
        weights, confidence = mixture.weigh(session.vocab_size)
        if mixture.line.chance * confidence < mixture.line.job.budget.threshold:
            mixture.line.going = False
        else:
            going.append((mixture, weights, confidence))
    drawing = [(mixture, weights) for mixture, weights, _ in going if not _greedy(mixture)]
    drawn: list[int] = []
    if drawing:
        contexts = [mixture.line.job.context for mixture, _ in drawing]
        ahead = [len(mixture.line.spine) for mixture, _ in drawing]
        drawn = session.timed(draw, np.stack([weights for _, weights in drawing]), contexts, ahead)
    tokens = iter(drawn)
    for mixture, weights, confidence in going:
        token = int(weights.argmax()) if _greedy(mixture) else next(tokens)
        mixture.take(token, weights, confidence)


def _greedy(mixture: _Mixture) -> bool:
    return mixture.line.job.context.sampling.greedy
