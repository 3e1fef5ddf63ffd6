"""Everything of a pool's step except drafting: chooses drafters, combines drafts, learns from commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, inf

from cospec.core.plugin_base import base_of
from cospec.core.types import Commit, Draft, DraftBudget
from cospec.drafters.pool.combiners.combiner import UNKNOWN, Combiner, CombineTask, DraftCandidates
from cospec.drafters.pool.combiners.union import merged
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.routing.drafter_weights import total
from cospec.drafters.pool.routing.routing import Feedback, Routing, RoutingInput, Similarity
from cospec.drafters.pool.state import (
    NOVELTY_RATE,
    DraftTask,
    Given,
    PoolRequestState,
    PoolStats,
    RequestCalibration,
)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The configuration of a pool.

    Attributes:
        names: ``[M]``, of the drafters.
        free: drafters without cost, which always take part, as bits.
        unscored: drafters that cannot score known tokens.
        lockstep: drafters that run in lockstep, token by token.
        allots: drafters draft only as deep as the tree has room for their tokens, see ``allot``.
        similarity: of two tokens, for a routing that compares; None: such a routing learns which tokens are equal.
    """

    names: tuple[str, ...]
    combiner: Combiner
    routing: Routing
    free: int = 0
    unscored: frozenset[int] = frozenset()
    lockstep: frozenset[int] = frozenset()
    allots: bool = False
    similarity: Similarity | None = None

    def route(self, draft_task: DraftTask, weights: Sequence[float], loads: Sequence[float]) -> list[float]:
        """Return the weights of the drafters that take part for one sequence, ``[M]``, as the routing chooses.

        The routing reads weights divided by ``1 + load``: drafts of a drafter with ``load`` unanswered requests take
        so many times as long (CoSine section 4.2). Combiners read the undivided weights.

        Args:
            loads: ``[M]``, see ``Executor.load``.
        """
        free, priced = self.chosen(draft_task, weights, loads)
        chosen = [*free, *priced]
        draft_task.record.weights.took_part(chosen)
        sum_, shares = total([weights[member] for member in chosen]), [0.0] * len(weights)
        for member in chosen:
            shares[member] = weights[member] / sum_
        return shares

    def chosen(
        self, draft_task: DraftTask, weights: Sequence[float], loads: Sequence[float]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the drafters that take part, without and with cost; see ``route``. Pure."""
        free, priced = _members(draft_task.able & self.free), _members(draft_task.able & ~self.free)
        if not priced:
            return free, ()
        context, ready = draft_task.context, weights
        if any(loads):
            ready = [weight / (1.0 + load) for weight, load in zip(weights, loads, strict=True)]
        base, most = len(context.tokens), draft_task.most
        choice = RoutingInput(priced, most, ready, context.seed, base, self.unscored, loads)
        return free, choice.heaviest(inf) if self.allots else self.routing.route(draft_task.record.weights, choice)

    @property
    def may_draft_alone(self) -> bool:
        """Whether one drafter's draft can be the combined draft; otherwise combiner or routing need every draft."""
        return self.combiner.follows_heaviest and not self.routing.learns and self.similarity is None

    def alone(
        self, draft_task: DraftTask, weights: Sequence[float], loads: Sequence[float]
    ) -> tuple[int, list[int]] | None:
        """Return the one drafter with a cost that takes part, and the heavier drafters without. Pure.

        The combined draft is that drafter's draft, unless a heavier drafter proposes. None: several take part. Called
        where ``may_draft_alone`` is True.
        """
        free, priced = self.chosen(draft_task, weights, loads)
        if len(priced) != 1:
            return None
        return priced[0], [member for member in free if _rank(weights, member) < _rank(weights, priced[0])]


@cache
def _members(bits: int) -> tuple[int, ...]:
    """Return the drafters whose bits are set, in ascending order."""
    return tuple([member for member in range(bits.bit_length()) if bits >> member & 1])


def _rank(weights: Sequence[float], member: int) -> tuple[float, int]:
    """Order drafters as combiners do: the heaviest first, then by number."""
    return -weights[member], member


def allot(
    pool_config: PoolConfig, budget: DraftBudget, weights: Sequence[float], calibrate: RequestCalibration
) -> list[int]:
    """Return the number of tokens that each drafter drafts, ``[M]``, so that the most valuable tokens fill the tree.

    The value of a drafter's ``j``-th token is its weight times its usual confidence to the power ``j``. ``union`` keeps
    nodes by this value, which is known before drafting. So the budget's nodes are assigned to the most valuable tokens
    in advance. The best drafters go deep, others add first tokens, and tokens that would be cut are not drafted. A
    token of several drafters makes one node, so the share of distinct tokens raises the number. Free drafters always
    draft the full depth; drafters that cannot score known tokens draft at least one token.
    """
    depth = min(budget.depth, budget.max_nodes)
    values: list[tuple[float, int]] = []
    for member, weight in enumerate(weights):
        if weight > 0 and not pool_config.free >> member & 1:
            value, sure = weight, calibrate(member, UNKNOWN)
            for _ in range(depth):
                value *= sure
                values.append((-value, member))
    given, novelty = [0] * len(weights), float(calibrate.pool_stats.novelty[int(calibrate.greedy)])
    for _, member in sorted(values)[: ceil(budget.max_nodes / novelty)]:
        given[member] += 1
    for member, weight in enumerate(weights):
        if weight > 0 and pool_config.free >> member & 1:
            given[member] = depth
        elif weight > 0 and member in pool_config.unscored:
            given[member] = max(1, given[member])
    return given


@dataclass
class Coordinator:
    """Chooses the drafters of each sequence, combines their drafts, and learns how right each drafter was."""

    pool_config: PoolConfig
    pool_stats: PoolStats
    _calibrations: list[RequestCalibration] = field(default_factory=list)  # of the latest ``choose``, as the weights
    _weights: list[list[float]] = field(default_factory=list)

    def choose(self, draft_tasks: Sequence[DraftTask], loads: Sequence[float]) -> list[list[int]]:
        """Return the number of tokens that each drafter drafts for each sequence, ``[M][R]``; 0 for no part.

        Args:
            loads: ``[M]``, see ``Executor.load``.
        """
        self._calibrations, self._weights, depths = [], [], list[list[int]]()
        for draft_task in draft_tasks:
            record, budget = draft_task.record, draft_task.budget
            weights, odds = record.weights.estimate(self.pool_stats.prior)
            chosen = self.pool_config.route(draft_task, weights, loads)
            calibrate = RequestCalibration(self.pool_stats, record.greedy, odds)
            self._weights.append(chosen)
            self._calibrations.append(calibrate)
            if self.pool_config.allots and not budget.outcomes:
                depths.append(allot(self.pool_config, budget, chosen, calibrate))
            else:
                depth = min(budget.depth, budget.max_nodes)
                depths.append([depth if weight > 0 else 0 for weight in chosen])
        return [list(own) for own in zip(*depths, strict=True)]

    def combine(
        self, draft_tasks: Sequence[DraftTask], given: Sequence[Given], session: LockstepSession
    ) -> list[Draft]:
        """Return one draft for each sequence with a candidate of any drafter.

        Args:
            draft_tasks: those of the latest ``choose``.
            given: whole drafts, grouped by drafter.
        """
        tasks, found = list[CombineTask](), [dict[int, Draft]() for _ in draft_tasks]
        for row, member, draft in given:
            found[row][member] = draft
        lockstep = sorted(self.pool_config.lockstep)
        chosen = zip(draft_tasks, found, self._weights, self._calibrations, strict=True)
        for draft_task, drafts, weights, calibrate in chosen:
            steppers = tuple([member for member in lockstep if weights[member] > 0])
            task = CombineTask(
                draft_task.context, draft_task.budget, weights, steppers, calibrate, drafts, calibrate.odds
            )
            for member, draft in drafts.items():
                task.candidate_sets[member] = DraftCandidates(draft)
            draft_task.record.ahead = drafts if draft_task.budget.outcomes else {}
            draft_task.record.candidate_sets = task.candidate_sets
            tasks.append(task)
        ahead = [task for task in tasks if task.budget.outcomes]
        tasks = [task for task in tasks if not task.budget.outcomes] if ahead else tasks
        combined = self.pool_config.combiner.combine(tasks, session, self.pool_config.names) if tasks else []
        if self.pool_config.allots:
            self._learn_novelty(tasks)
        continued = [self._after_outcomes(task) for task in ahead]
        return [*combined, *[draft for draft in continued if draft is not None]]

    def _after_outcomes(self, task: CombineTask) -> Draft | None:
        """Merge all drafts that continue outcomes of a verification, whatever the combiner: only ``match`` takes these.

        The part that follows the outcome is cut to its budget later.
        """
        tree = merged(task)
        draft = tree.draft(task.context, range(len(tree.tokens)), self.pool_config.names)
        return None if draft is None else replace(draft, base_len=base_of(task.context, task.budget))

    def _learn_novelty(self, tasks: Sequence[CombineTask]) -> None:
        """Learn the share of distinct tokens from the combined trees."""
        novelty = self.pool_stats.novelty
        for task in tasks:
            if task.drafts:
                kind = int(task.context.sampling.greedy)
                drafted = sum([len(draft.tokens) for draft in task.drafts.values()])
                novelty[kind] += NOVELTY_RATE * (task.distinct / drafted - novelty[kind])

    def learn(self, commits: Sequence[tuple[PoolRequestState, Commit]]) -> None:
        """Compare every drafter's candidates with the committed tokens; candidates that were not verified count too."""
        views, learns = self.pool_stats.views, self.pool_config.routing.learns
        similarity = self.pool_config.similarity
        for record, commit in commits:
            weights, candidate_sets, calibrations = record.weights, record.candidate_sets, views[record.greedy]
            record.candidate_sets = {}
            weights.accepted = len(commit.path)
            weights.decay(len(commit.tokens))
            found = dict[int, Feedback]()
            for member, candidates in candidate_sets.items():
                found[member] = feedback = candidates.verify(commit.tokens, similarity)
                weights.count(member, feedback.hits, feedback.seen)
                calibrations[0][member].learn(feedback.samples)
                if feedback.second_samples:
                    calibrations[1][member].learn(feedback.second_samples)
            if learns:
                self.pool_config.routing.learn(weights, found)
