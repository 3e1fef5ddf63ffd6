"""The pool's own work in Python, one sequence at a time; ``native/pool.py`` must agree bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from cospec.core.types import Commit, Draft, DraftBudget
from cospec.drafters.pool.combiners.combine import UNKNOWN, Combiner, CombineTask, DraftCandidates
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.routing.selection import Routing, RoutingInput
from cospec.drafters.pool.routing.weights import DrafterWeights, total
from cospec.drafters.pool.state import (
    NOVELTY_RATE,
    DraftTask,
    Given,
    PoolRequestState,
    PoolStats,
    StatsCalibration,
)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The configuration of a pool.

    Attributes:
        names: ``[M]``, of the drafters.
        free: drafters without cost, which always take part, as bits.
        silent: drafters that cannot score known tokens.
        led: drafters that run in lockstep, token by token.
        allots: drafters draft only as deep as the tree has room for their tokens, see ``allot``.
    """

    names: tuple[str, ...]
    combiner: Combiner
    routing: Routing
    free: int = 0
    silent: frozenset[int] = frozenset()
    led: frozenset[int] = frozenset()
    allots: bool = False

    def route(self, draft_task: DraftTask, weights: Sequence[float]) -> list[float]:
        """Return the weights of the drafters that take part for one sequence, ``[M]``, as the routing chooses."""
        able = [member for member in range(len(weights)) if draft_task.able >> member & 1]
        chosen = [member for member in able if self.free >> member & 1]
        priced = tuple([member for member in able if not self.free >> member & 1])
        standing, context = draft_task.record.standing, draft_task.context
        if priced:
            choice = RoutingInput(priced, draft_task.most, weights, context.seed, len(context.tokens), self.silent)
            chosen += choice.heaviest(inf) if self.allots else self.routing.route(standing, choice)
        standing.took_part(chosen)
        sum_, shares = total(weights[member] for member in chosen), [0.0] * len(weights)
        for member in chosen:
            shares[member] = weights[member] / sum_
        return shares


def allot(pool_config: PoolConfig, budget: DraftBudget, weights: Sequence[float], trust: StatsCalibration) -> list[int]:
    """Return the number of tokens that each drafter drafts, ``[M]``, so that the most valuable tokens fill the tree.

    The value of a drafter's ``j``-th token is its weight times its usual confidence to the power ``j``. ``union`` keeps
    nodes by this value, which is known before drafting. So the budget's nodes are assigned to the most valuable tokens
    in
    advance. The best drafters go deep, others add first tokens, and tokens that would be cut are not drafted. A token
    of several drafters makes one node, so the share of distinct tokens raises the number. Free drafters always draft
    the
    full depth; drafters that cannot score known tokens draft at least one token.
    """
    depth, capabilities_of = min(budget.depth, budget.max_nodes), []
    for member, weight in enumerate(weights):
        if weight > 0 and not pool_config.free >> member & 1:
            value, sure = weight, trust(member, UNKNOWN)
            for _ in range(depth):
                value *= sure
                capabilities_of.append((-value, member))
    given = [0] * len(weights)
    for _, member in sorted(capabilities_of)[
        : ceil(budget.max_nodes / float(trust.pool_stats.novelty[int(trust.greedy)]))
    ]:
        given[member] += 1
    for member, weight in enumerate(weights):
        if weight > 0 and pool_config.free >> member & 1:
            given[member] = depth
        elif weight > 0 and member in pool_config.silent:
            given[member] = max(1, given[member])
    return given


@dataclass(slots=True)
class ReferencePool:
    """Implements ``state.PoolImplementation``."""

    pool_config: PoolConfig
    pool_stats: PoolStats
    _trusts: list[StatsCalibration] = field(default_factory=list)
    _weights: list[list[float]] = field(default_factory=list)

    def choose(self, draft_tasks: Sequence[DraftTask]) -> list[list[int]]:
        """See ``state.PoolImplementation``."""
        self._trusts, self._weights, depths = [], [], list[list[int]]()
        for draft_task in draft_tasks:
            weights, odds = draft_task.record.standing.estimate(self.pool_stats.prior)
            self._weights.append(self.pool_config.route(draft_task, weights))
            self._trusts.append(StatsCalibration(self.pool_stats, draft_task.context.sampling.greedy, odds))
            if self.pool_config.allots:
                depths.append(allot(self.pool_config, draft_task.budget, self._weights[-1], self._trusts[-1]))
            else:
                depths.append(
                    [min(draft_task.budget.depth, draft_task.budget.max_nodes) * (w > 0) for w in self._weights[-1]]
                )
        return [list(own) for own in zip(*depths, strict=True)]

    def combine(
        self, draft_tasks: Sequence[DraftTask], given: Sequence[Given], session: LockstepSession
    ) -> list[Draft]:
        """See ``state.PoolImplementation``."""
        tasks, found = [], [dict[int, Draft]() for _ in draft_tasks]
        for row, member, draft in given:
            found[row][member] = draft
        for draft_task, drafts, weights, trust in zip(draft_tasks, found, self._weights, self._trusts, strict=True):
            led = tuple(member for member in sorted(self.pool_config.led) if weights[member] > 0)
            task = CombineTask(draft_task.context, draft_task.budget, weights, led, trust, drafts)
            task.slates.update({member: DraftCandidates(draft) for member, draft in drafts.items()})
            draft_task.record.said = trust, task.slates
            tasks.append(task)
            if self.pool_config.allots and drafts:
                place = int(draft_task.context.sampling.greedy)
                novelty = self.pool_stats.novelty
                novelty[place] += NOVELTY_RATE * (_novelty(drafts.values()) - novelty[place])
        return self.pool_config.combiner.combine(tasks, session, self.pool_config.names)

    def learn(self, commits: Sequence[tuple[PoolRequestState, Commit]]) -> None:
        """See ``state.PoolImplementation``."""
        for record, commit in commits:
            (trust, slates), record.said = record.said, None
            standing: DrafterWeights = record.standing
            standing.went(len(commit.path))
            standing.fade(len(commit.tokens))
            found = {member: slate.verify(commit.tokens) for member, slate in slates.items()}
            for member, part in found.items():
                standing.saw(member, part.hits, part.seen)
                self.pool_stats.calibration(trust.greedy, 0, member).learn(part.lessons)
                self.pool_stats.calibration(trust.greedy, 1, member).learn(part.seconds)
            if self.pool_config.routing.learns:
                self.pool_config.routing.learn(standing, found)


def _novelty(drafts: Iterable[Draft]) -> float:
    """Return the share of tokens that no other draft has at the same place."""
    found, count = set[tuple[int, ...]](), 0
    for draft in drafts:
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.update(paths)
        count += len(paths)
    return len(found) / count
