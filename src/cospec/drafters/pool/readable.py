"""A pool's own work in Python, one sequence after the other: what ``compiled`` has to agree with, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cospec.drafters.combiners.job import Combiner, DraftSlate, Job
from cospec.drafters.combiners.session import Session
from cospec.drafters.pool.record import Knowledge, Record, Seat, Trust
from cospec.drafters.routing.choice import Choice, Routing
from cospec.drafters.routing.standing import Standing, total
from cospec.types import Commit, Draft


@dataclass(frozen=True, slots=True)
class Staff:
    """Who works in a pool.

    Attributes:
        names: ``[M]``, of the drafters.
        free: drafters that cost nothing, so that they always take part, as bits.
        silent: drafters that cannot look at known tokens.
        led: drafters that are led token by token.
    """

    names: tuple[str, ...]
    combiner: Combiner
    routing: Routing
    free: int = 0
    silent: frozenset[int] = frozenset()
    led: frozenset[int] = frozenset()

    def route(self, seat: Seat, most: int | None, weights: Seq[float]) -> list[float]:
        """``[M]``: the weights of those that take part for one sequence, as the routing chooses."""
        able = [member for member in range(len(weights)) if seat.able >> member & 1]
        chosen = [member for member in able if self.free >> member & 1]
        priced = tuple([member for member in able if not self.free >> member & 1])
        standing, context = seat.record.standing, seat.context
        if priced:
            choice = Choice(priced, most, weights, context.seed, len(context.tokens), self.silent)
            chosen += self.routing.route(standing, choice)
        standing.took_part(chosen)
        sum_, shares = total(weights[member] for member in chosen), [0.0] * len(weights)
        for member in chosen:
            shares[member] = weights[member] / sum_
        return shares


@dataclass(slots=True)
class Readable:
    """See ``record.Work``."""

    staff: Staff
    knowledge: Knowledge
    _trusts: list[Trust] = field(default_factory=list)
    _weights: list[list[float]] = field(default_factory=list)

    def choose(self, seats: Seq[Seat], most: Seq[int | None]) -> list[list[float]]:
        """See ``record.Work``."""
        self._trusts, self._weights = [], []
        for seat, count in zip(seats, most, strict=True):
            weights, odds = seat.record.standing.estimate(self.knowledge.prior)
            self._weights.append(self.staff.route(seat, count, weights))
            self._trusts.append(Trust(self.knowledge, seat.context.sampling.greedy, odds))
        return self._weights

    def combine(self, seats: Seq[Seat], given: Seq[dict[int, Draft]], session: Session) -> list[Draft]:
        """See ``record.Work``."""
        jobs = []
        for seat, drafts, weights, trust in zip(seats, given, self._weights, self._trusts, strict=True):
            led = tuple(member for member in sorted(self.staff.led) if weights[member] > 0)
            job = Job(seat.context, seat.budget, weights, led, trust, drafts)
            job.slates.update({member: DraftSlate(draft) for member, draft in drafts.items()})
            seat.record.said = trust, job.slates
            jobs.append(job)
        return self.staff.combiner.combine(jobs, session, self.staff.names)

    def learn(self, commits: Seq[tuple[Record, Commit]]) -> None:
        """See ``record.Work``."""
        for record, commit in commits:
            trust, slates = record.said
            standing: Standing = record.standing
            standing.fade(len(commit.tokens))
            found = {member: slate.judge(commit.tokens) for member, slate in slates.items()}
            for member, part in found.items():
                standing.saw(member, part.hits, part.seen)
                self.knowledge.calibration(trust.greedy, 0, member).learn(part.lessons)
                self.knowledge.calibration(trust.greedy, 1, member).learn(part.seconds)
            if self.staff.routing.learns:
                self.staff.routing.learn(standing, found)
