"""A pool's own work in Python, one sequence after the other: what ``compiled`` has to agree with, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import ceil, inf

from cospec.drafters.combiners.job import UNKNOWN, Combiner, DraftSlate, Job
from cospec.drafters.combiners.session import Session
from cospec.drafters.pool.record import NOVELTY_RATE, Given, Knowledge, Record, Seat, Trust
from cospec.drafters.routing.choice import Choice, Routing
from cospec.drafters.routing.standing import Standing, total
from cospec.types import Budget, Commit, Draft


@dataclass(frozen=True, slots=True)
class Staff:
    """Who works in a pool.

    Attributes:
        names: ``[M]``, of the drafters.
        free: drafters that cost nothing, so that they always take part, as bits.
        silent: drafters that cannot look at known tokens.
        led: drafters that are led token by token.
        allots: drafters go no deeper than the tree has room for what they say, see ``allot``.
    """

    names: tuple[str, ...]
    combiner: Combiner
    routing: Routing
    free: int = 0
    silent: frozenset[int] = frozenset()
    led: frozenset[int] = frozenset()
    allots: bool = False

    def route(self, seat: Seat, weights: Seq[float]) -> list[float]:
        """``[M]``: the weights of those that take part for one sequence, as the routing chooses."""
        able = [member for member in range(len(weights)) if seat.able >> member & 1]
        chosen = [member for member in able if self.free >> member & 1]
        priced = tuple([member for member in able if not self.free >> member & 1])
        standing, context = seat.record.standing, seat.context
        if priced:
            choice = Choice(priced, seat.most, weights, context.seed, len(context.tokens), self.silent)
            chosen += choice.heaviest(inf) if self.allots else self.routing.route(standing, choice)
        standing.took_part(chosen)
        sum_, shares = total(weights[member] for member in chosen), [0.0] * len(weights)
        for member in chosen:
            shares[member] = weights[member] / sum_
        return shares


def allot(staff: Staff, budget: Budget, weights: Seq[float], trust: Trust) -> list[int]:
    """``[M]``: how many tokens each drafter drafts, so that the tree's nodes go where they are worth most.

    The ``j``-th token of a drafter is worth its weight times its usual confidence to the power of ``j``, which is what
    ``union`` keeps nodes by, and which is known before anybody drafts. So the nodes of the budget are given to the most
    valuable tokens beforehand: the best drafters go deep, others say what they would begin with, and what would be cut
    is not drafted. Tokens that several drafters have make one node, so there are more of them by the share that was new
    so far. Who costs nothing goes all the way beside that; who cannot look is heard of, if by one token.
    """
    depth, offers = min(budget.depth, budget.max_nodes), []
    for member, weight in enumerate(weights):
        if weight > 0 and not staff.free >> member & 1:
            value, sure = weight, trust(member, UNKNOWN)
            for _ in range(depth):
                value *= sure
                offers.append((-value, member))
    given = [0] * len(weights)
    for _, member in sorted(offers)[: ceil(budget.max_nodes / float(trust.knowledge.novelty[int(trust.greedy)]))]:
        given[member] += 1
    for member, weight in enumerate(weights):
        if weight > 0 and staff.free >> member & 1:
            given[member] = depth
        elif weight > 0 and member in staff.silent:
            given[member] = max(1, given[member])
    return given


@dataclass(slots=True)
class Readable:
    """See ``record.Work``."""

    staff: Staff
    knowledge: Knowledge
    _trusts: list[Trust] = field(default_factory=list)
    _weights: list[list[float]] = field(default_factory=list)

    def choose(self, seats: Seq[Seat]) -> list[list[int]]:
        """See ``record.Work``."""
        self._trusts, self._weights, depths = [], [], list[list[int]]()
        for seat in seats:
            weights, odds = seat.record.standing.estimate(self.knowledge.prior)
            self._weights.append(self.staff.route(seat, weights))
            self._trusts.append(Trust(self.knowledge, seat.context.sampling.greedy, odds))
            if self.staff.allots:
                depths.append(allot(self.staff, seat.budget, self._weights[-1], self._trusts[-1]))
            else:
                depths.append([min(seat.budget.depth, seat.budget.max_nodes) * (w > 0) for w in self._weights[-1]])
        return [list(own) for own in zip(*depths, strict=True)]

    def combine(self, seats: Seq[Seat], given: Seq[Given], session: Session) -> list[Draft]:
        """See ``record.Work``."""
        jobs, found = [], [dict[int, Draft]() for _ in seats]
        for row, member, draft in given:
            found[row][member] = draft
        for seat, drafts, weights, trust in zip(seats, found, self._weights, self._trusts, strict=True):
            led = tuple(member for member in sorted(self.staff.led) if weights[member] > 0)
            job = Job(seat.context, seat.budget, weights, led, trust, drafts)
            job.slates.update({member: DraftSlate(draft) for member, draft in drafts.items()})
            seat.record.said = trust, job.slates
            jobs.append(job)
            if self.staff.allots and drafts:
                place = int(seat.context.sampling.greedy)
                novelty = self.knowledge.novelty
                novelty[place] += NOVELTY_RATE * (_novelty(drafts.values()) - novelty[place])
        return self.staff.combiner.combine(jobs, session, self.staff.names)

    def learn(self, commits: Seq[tuple[Record, Commit]]) -> None:
        """See ``record.Work``."""
        for record, commit in commits:
            (trust, slates), record.said = record.said, None
            standing: Standing = record.standing
            standing.went(len(commit.path))
            standing.fade(len(commit.tokens))
            found = {member: slate.judge(commit.tokens) for member, slate in slates.items()}
            for member, part in found.items():
                standing.saw(member, part.hits, part.seen)
                self.knowledge.calibration(trust.greedy, 0, member).learn(part.lessons)
                self.knowledge.calibration(trust.greedy, 1, member).learn(part.seconds)
            if self.staff.routing.learns:
                self.staff.routing.learn(standing, found)


def _novelty(drafts: Iterable[Draft]) -> float:
    """The share of their tokens that stand in no other draft at the same place."""
    found, told = set[tuple[int, ...]](), 0
    for draft in drafts:
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.update(paths)
        told += len(paths)
    return len(found) / told
