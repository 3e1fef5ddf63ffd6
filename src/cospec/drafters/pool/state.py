"""State of a pool: per request, per step, and learned statistics of its drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cospec.core.plugin_base import SoleDrafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import Calibration, cells
from cospec.drafters.draft_subtrees import after
from cospec.drafters.pool.combiners.combiner import CandidateSet, DraftCandidates
from cospec.drafters.pool.routing.drafter_weights import DrafterWeights, WeightPrior
from cospec.drafters.pool.routing.prompt_prior import PromptPrior

NOVELTY_RATE = 0.05  # step size of the moving average, per draft
EDGE = 0.01  # minimum distance of a confidence from 0 and 1


@dataclass(slots=True)
class PoolRequestState:
    """One request.

    Attributes:
        weights: how the drafters perform for the request.
        greedy: tokens are not sampled.
        base: committed tokens when the latest draft was made; -1 after its commit, or without a draft.
        alone: the drafter that native code runs for the request; -1: ``propose`` drafts.
        candidate_sets: the drafters' candidates, until the step is committed.
        ahead: whole drafts after outcomes of the verification in flight, by drafter.
        sole: the latest answer of ``PoolDrafter.drafts_alone``; None after a commit or a proposal.
        subject: see ``PromptPrior``; None where the request names its drafters.
    """

    weights: DrafterWeights
    greedy: bool
    base: int = -1
    alone: int = -1
    candidate_sets: Mapping[int, CandidateSet] = field(default_factory=dict)
    ahead: Mapping[int, Draft] = field(default_factory=dict)
    sole: SoleAnswer | None = None
    subject: frozenset[int] | None = None

    def continue_ahead(self, commit: Commit) -> None:
        """Make candidates of what the drafts made ahead have after a commit."""
        rests = {member: after(draft, commit.tokens) for member, draft in self.ahead.items()}
        current = all([draft.base_len == commit.base_len for draft in self.ahead.values()])
        self.ahead = {}
        if current:
            self.candidate_sets = {n: DraftCandidates(rest) for n, rest in rests.items() if rest is not None}
            self.base = commit.base_len + len(commit.tokens)


class SoleAnswer(NamedTuple):
    """Whether one drafter drafts alone for a request, which an engine asks several times a step."""

    known: int  # tokens of the request
    budget: DraftBudget
    found: SoleDrafter | str


class DraftTask(NamedTuple):
    """One sequence to draft for in a step.

    Attributes:
        able: the drafters that may take part, as bits.
        most: the maximum number of drafters, see ``RoutingInput.most``.
    """

    context: DraftContext
    budget: DraftBudget
    record: PoolRequestState
    able: int
    most: int | None


Given = tuple[int, int, Draft]  # row of the sequence, number of the drafter, its whole draft


class PoolStats:
    """Learned statistics of a pool's drafters.

    Attributes:
        calibrations: ``[2, 2, M, 2, bins]``: of sampling and greedy requests, whose probabilities differ in meaning; of
            first and of second choices; see ``calibration.cells``.
        views: the same by kind, rank and drafter, as ``Calibration``.
        prior: the rates that a new request starts with.
        prompts: what prompts say about the drafters.
        novelty: ``[2]``, of sampling and greedy requests: a moving average of the share of distinct drafted tokens.
    """

    def __init__(self, members: int) -> None:
        self.calibrations = cells(2, 2, members)
        self.views = [[[Calibration(each) for each in ranked] for ranked in kind] for kind in self.calibrations]
        self.prior = WeightPrior([0.5] * members)
        self.prompts = PromptPrior(members)
        self.novelty = np.ones(2)

    def start(self, context: DraftContext) -> PoolRequestState:
        """Return the state of a new request."""
        subject, gains = None, list[float]()
        if context.drafters is None:
            subject = self.prompts.subject(context.tokens[: context.prompt_len])
            gains = self.prompts.gains(subject)
        weights = DrafterWeights(len(self.prior.rates), gains)
        return PoolRequestState(weights, context.sampling.greedy, subject=subject)

    def learn(self, finished: PoolRequestState) -> None:
        """Learn from a request that has ended. Without scores its evidence is one-sided, and no prompt's."""
        weights = finished.weights
        self.prior.learn(weights)
        if finished.subject is not None and any(weights.looked):
            self.prompts.learn(
                finished.subject, weights.evidence(self.prior), [looked > 0 for looked in weights.looked]
            )

    def calibration(self, greedy: bool, rank: int, member: int) -> Calibration:
        """Return one calibration; it shares the storage."""
        return self.views[greedy][rank][member]


@dataclass(slots=True)
class RequestCalibration:
    """Calibrated confidence, adjusted by a drafter's performance for one request relative to its usual performance.

    Attributes:
        odds: ``[M]``, factors of the odds.
    """

    pool_stats: PoolStats
    greedy: bool
    odds: Sequence[float]

    def __call__(self, member: int, raw: float, rank: int = 0) -> float:
        """Return the probability that a token is committed given its parent; ``rank`` 1 is a second choice."""
        chance = self.pool_stats.views[self.greedy][rank][member].read(raw)
        if chance < EDGE:
            chance = EDGE
        elif chance > 1.0 - EDGE:
            chance = 1.0 - EDGE
        raised = chance * self.odds[member]
        return raised / (raised + 1.0 - chance)
