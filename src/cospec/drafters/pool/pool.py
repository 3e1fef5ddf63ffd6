"""Several drafters that work together (CoSine section 4.2, Minions section 3.2; spec section 4, ``pool``).

A round of a pool: the routing says who works for which sequence; every drafter is asked once for all of its sequences,
or led token by token; the combiner makes one draft per sequence; what was committed teaches weights and confidences.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cospec.drafters.calibration import Calibration
from cospec.drafters.combiners.job import Combiner, DraftSlate, Job
from cospec.drafters.combiners.session import Session
from cospec.drafters.pool.member import Member
from cospec.drafters.pool.options import PoolOptions, build_drafters, check_distributions
from cospec.drafters.pool.record import Record, Trust
from cospec.drafters.routing.choice import Choice, Routing
from cospec.drafters.routing.standing import Prior, Standing
from cospec.draws import Purpose
from cospec.protocols import Clock, Host
from cospec.registry import COMBINERS, ROUTINGS
from cospec.types import Budget, Commit, Context, Draft, Offer

LOOK_AGAIN = 16  # rounds between the first two looks; the time doubles


@dataclass(frozen=True, slots=True)
class PoolSetting:
    """Where a pool works.

    Attributes:
        vocab_size: of the target.
        at_most: drafters that take part, where the policy does not say how many; None leaves it to the routing.
    """

    vocab_size: int
    clock: Clock = time.monotonic
    at_most: int | None = None


@dataclass(slots=True)
class PoolSeconds:
    """Where a pool's time went, in seconds.

    Attributes:
        drafters: in the drafters, and in reading their logits, which each would do for itself alone.
        own: in combining, weighting and routing.
    """

    drafters: float = 0.0
    own: float = 0.0


class PoolDrafter:
    """Any number of drafters of any kind, each with a name that its tokens carry.

    ``noises`` says which rules may judge its drafts, see ``combiners.job.Combiner``; sequences that are judged by
    another rule get no draft.
    """

    samples: ClassVar[bool] = True
    drafts_ahead: ClassVar[bool] = False
    reads_states: bool = False  # unless a member does
    Options: ClassVar[type[PoolOptions]] = PoolOptions

    def __init__(self, members: Seq[Member], combiner: Combiner, routing: Routing, setting: PoolSetting) -> None:
        self.name = "pool"
        self.members, self.combiner, self.routing, self.setting = tuple(members), combiner, routing, setting
        self.names = tuple(member.name for member in self.members)
        self.noises: frozenset[Purpose] = combiner.noises
        self.reads_states = any(member.drafter.reads_states for member in self.members)
        priced = sum(not member.free for member in self.members)
        self.offer = Offer(
            free=priced == 0, trees=combiner.branches, chains=not combiner.branches, members=max(1, priced)
        )
        self.prior = Prior(len(self.members))
        # Greedy requests and those that draw are apart: a probability means something else for each.
        self.calibrations = {
            greedy: [[Calibration() for _ in self.members] for _ in range(2)] for greedy in (True, False)
        }
        self.seconds = PoolSeconds()
        self._steppers = {number: each.stepper for number, each in enumerate(self.members) if each.stepper is not None}
        self._silent = frozenset(n for n, each in enumerate(self.members) if not (each.free or each.looks))
        self._records: dict[str, Record] = {}

    @classmethod
    def build(cls, options: PoolOptions, host: Host) -> PoolDrafter:
        """Build every drafter; errors name the one that they are about."""
        combiner, routing = COMBINERS.load(options.combiner)(), ROUTINGS.load(options.routing)()
        drafters = build_drafters(options, host)
        if Purpose.DRAFT in combiner.noises:
            check_distributions(drafters, options.combiner)
        clock = time.monotonic
        members = [Member.of(each.name, each.drafter, clock, combiner.steps, options.deadline) for each in drafters]
        return cls(members, combiner, routing, PoolSetting(host.target.vocab_size, clock, options.at_most))

    def propose(self, contexts: Seq[Context], budgets: Seq[Budget]) -> list[Draft]:
        """One combined draft for each context that any of its drafters has something for."""
        started, reading = self.setting.clock(), 0.0
        before = sum(member.seconds for member in self.members)
        for member in self.members:
            member.begin_round()
        present = [number for number, member in enumerate(self.members) if not member.rest]
        pairs = zip(contexts, budgets, strict=True)
        if self.routing.looks:
            self._look(contexts, budgets, present)
        jobs = [job for context, budget in pairs if (job := self._job(context, budget, present))]
        drafts: list[Draft] = []
        if jobs:
            self._ask(jobs)
            session = self._session()
            drafts = self.combiner.combine(jobs, session, self.names)
            reading = session.reading
            self._remember(jobs, session)
        self._forget_lost()
        inside = sum(member.seconds for member in self.members) - before + reading
        self.seconds.drafters += inside
        self.seconds.own += self.setting.clock() - started - inside
        return drafts

    def commit(self, commits: Seq[Commit]) -> None:
        """Tell every drafter, and learn how right each one was."""
        started = self.setting.clock()
        for commit in commits:
            record = self._records.get(commit.id)
            if record is not None:
                parts = record.learn(commit)
                if parts:
                    self.routing.learn(record.standing, parts)
                if commit.finish is not None:
                    self.prior.learn(record.standing)
        self.seconds.own += self.setting.clock() - started
        for member in self.members:
            member.commit(commits)
        self._forget_lost()

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences, here and in every drafter."""
        for id in ids:
            self._records.pop(id, None)
        for member in self.members:
            member.forget(ids)

    def weights(self) -> Mapping[str, float]:
        """The mean weight of each drafter over the present requests; what a new one starts with when there are none."""
        standings = [record.standing for record in list(self._records.values())] or [Standing.fresh(len(self.members))]
        mean = np.mean([standing.weights(self.prior) for standing in standings], axis=0)
        return dict(zip(self.names, mean.tolist(), strict=True))

    def left_out(self) -> Mapping[str, int]:
        """How often each drafter failed or was late."""
        return {member.name: member.left_out.total() for member in self.members}

    def _job(self, context: Context, budget: Budget, present: Seq[int]) -> Job | None:
        """Who of those present works for a sequence; None when nobody can, or may."""
        able = present
        if context.drafters is not None:
            able = [number for number in present if self.names[number] in context.drafters]
        if not able or min(budget.depth, budget.max_nodes) < 1 or context.noise not in self.noises:
            return None
        record = self._record(context.id)
        standing = record.standing
        weights, odds = standing.estimate(self.prior)
        chosen = self._chosen(standing, able, weights, context, budget)
        standing.took_part(chosen)
        total = sum([weights[number] for number in chosen])
        shares = [0.0] * len(weights)
        for number in chosen:
            shares[number] = weights[number] / total
        steppers = tuple([number for number in chosen if number in self._steppers])
        record.trust = Trust(self.calibrations[context.sampling.greedy], odds)
        return Job(context, budget, shares, steppers, record.trust)

    def _record(self, id: str) -> Record:
        record = self._records.get(id)
        if record is None:
            record = self._records[id] = Record(Standing.fresh(len(self.members)))
        return record

    def _look(self, contexts: Seq[Context], budgets: Seq[Budget], present: Seq[int]) -> None:
        """Have drafters that can look at known tokens do so where it is time for that."""
        due = []
        for context, budget in zip(contexts, budgets, strict=True):
            standing = self._record(context.id).standing
            if standing.rounds >= standing.look_at and budget.depth > 0 and context.noise in self.noises:
                standing.look_at += LOOK_AGAIN + standing.look_at
                due.append(context)
        for number in present if due else ():
            looks = self.members[number].look(due)
            for id, (chance, tokens) in looks.items():
                self._records[id].standing.look(number, chance, tokens)

    def _chosen(
        self, standing: Standing, able: Seq[int], weights: Seq[float], context: Context, budget: Budget
    ) -> list[int]:
        """The drafters that cost nothing, and those that the routing chooses of the others."""
        chosen = [number for number in able if self.members[number].free]
        priced = tuple([number for number in able if not self.members[number].free])
        if priced:
            count = self.setting.at_most if budget.drafters is None else budget.drafters
            choice = Choice(priced, count, weights, context.seed, len(context.tokens), self._silent)
            chosen += self.routing.route(standing, choice)
        return chosen

    def _ask(self, jobs: Seq[Job]) -> None:
        """Whole drafts, each drafter once for all of its sequences; those that answer later are asked first."""
        asked = {}
        parts = self._parts(jobs)
        for number, member in enumerate(self.members):
            if member.stepper is None:
                seats = [(job, part) for job, part in zip(jobs, parts, strict=True) if job.weights[number] > 0]
                if seats:
                    own = [job for job, _ in seats]
                    asked[number] = own, [job.context for job in own], [part for _, part in seats]
        started = self.setting.clock()
        later = [number for number in asked if self.members[number].later]
        futures = {number: self.members[number].start(*asked[number][1:]) for number in later}
        for number, (own, contexts, budgets) in asked.items():
            if number not in futures:
                self._take(number, own, self.members[number].propose(contexts, budgets))
        for number, future in futures.items():
            if future is not None:
                self._take(number, asked[number][0], self.members[number].collect(future, started))

    def _parts(self, jobs: Seq[Job]) -> list[Budget]:
        """What a drafter is asked for, job by job; neighbours mostly have the same budget."""
        parts: list[Budget] = []
        for number, job in enumerate(jobs):
            same = number and job.budget is jobs[number - 1].budget
            parts.append(parts[-1] if same else self._part(job.budget))
        return parts

    def _part(self, budget: Budget) -> Budget:
        """What one drafter is asked for: a tree where the policy says how to branch and the combiner takes one."""
        shaped = self.combiner.branches and bool(budget.widths)
        nodes, widths = (budget.max_nodes, budget.widths) if shaped else (min(budget.depth, budget.max_nodes), ())
        confident = budget.confident or self.combiner.confident
        return Budget(budget.depth, nodes, widths, threshold=budget.threshold, confident=confident)

    def _take(self, number: int, jobs: Seq[Job], drafts: Seq[Draft]) -> None:
        """Give each job its draft, unless it is stale or of a shape that the combiner cannot use."""
        found = {draft.id: draft for draft in drafts}
        for job in jobs:
            draft = found.get(job.context.id)
            if draft and draft.base_len == job.base and (self.combiner.branches or draft.is_chain):
                job.drafts[number], job.slates[number] = draft, DraftSlate(draft)

    def _session(self) -> Session:
        return Session(self._steppers, dict(enumerate(self.members)), self.setting.vocab_size, self.setting.clock)

    def _remember(self, jobs: Seq[Job], session: Session) -> None:
        """What has to be known when the round is committed."""
        for job in jobs:
            record = self._records[job.context.id]
            record.base, record.slates = job.base, job.slates

    def _forget_lost(self) -> None:
        """A drafter that raised forgets everything: nobody can tell what state it is in."""
        for member in self.members:
            if member.lost:
                member.lost = False
                member.forget(list(self._records))
