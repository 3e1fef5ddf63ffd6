"""State of a pool: per request, per step, and learned statistics of its drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from cospec.core.rng import StreamKind
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import Calibration, cells
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.routing.weights import DrafterWeights, WeightPrior

if TYPE_CHECKING:
    from cospec.drafters.pool.reference import PoolConfig

NOVELTY_RATE = 0.05  # step size of the moving average, per draft
_WORD = 2**64
EDGE = 0.01  # minimum distance of a confidence from 0 and 1


@dataclass(slots=True)
class PoolRequestState:
    """One request.

    Attributes:
        words: the constant first words of ``DraftTaskStruct`` in ``csrc/spec/pool_batch.h``.
        plain: no row of logits is edited or truncated.
        draws, keeps: tokens are sampled; and the draft keeps their q.
        base: committed tokens when the latest draft was made; -1 after its commit, or without a draft.
        said: the drafters' guesses, in the form of the ``PoolImplementation``, until the step is committed.
    """

    standing: DrafterWeights
    words: tuple[float, ...]
    plain: bool
    draws: bool
    keeps: bool
    base: int = -1
    said: Any = None

    @classmethod
    def of(cls, context: DraftContext, members: int) -> PoolRequestState:
        """Return the state of a new request in a pool of ``members`` drafters."""
        standing, params = DrafterWeights(members), context.sampling
        draws = not params.greedy
        heat = params.temperature if draws else 0.0
        words = (standing.address, int(params.greedy), context.seed % _WORD, int(context.stream_kind), heat)
        plain = not (params.edits_logits or (params.truncates and draws))
        return cls(standing, words, plain, draws, draws and context.stream_kind is StreamKind.DRAFT)


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
            first and of second guesses; see ``calibration.cells``.
        prior: the rates that a new request starts with.
        novelty: ``[2]``, of sampling and greedy requests: a moving average of the share of distinct drafted tokens.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.calibrations = cells(2, 2, members)
        self.address: int = self.calibrations.ctypes.data
        self.prior = WeightPrior(members)
        self.novelty = np.ones(2)

    def calibration(self, greedy: bool, rank: int, member: int) -> Calibration:
        """Return one calibration; it shares the storage."""
        return Calibration(self.calibrations[int(greedy), rank, member])


class PoolImplementation(Protocol):
    """The pool's own work for all sequences of a step, in Python or native, with the same bits."""

    @property
    def pool_config(self) -> PoolConfig:
        """The configuration of the pool."""

    def choose(self, draft_tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return the number of tokens that each drafter drafts for each sequence, ``[M][R]``; 0 for no part."""

    def combine(
        self, draft_tasks: Sequence[DraftTask], given: Sequence[Given], session: LockstepSession
    ) -> list[Draft]:
        """Return one draft for each sequence with a guess of any drafter.

        Args:
            draft_tasks: those of the latest ``choose``.
            given: whole drafts, grouped by drafter.
        """

    def learn(self, commits: Sequence[tuple[PoolRequestState, Commit]]) -> None:
        """Count every drafter's guesses against the committed tokens; guesses that were not verified count too.

        The stored guesses are dropped.
        """


@dataclass(slots=True)
class StatsCalibration:
    """Calibrated confidence, adjusted by a drafter's performance for one request relative to its usual performance.

    Attributes:
        odds: ``[M]``, factors of the odds.
    """

    pool_stats: PoolStats
    greedy: bool
    odds: Sequence[float]

    def __call__(self, member: int, raw: float, rank: int = 0) -> float:
        """Return the probability that a token is committed given its parent; ``rank`` 1 is a second guess."""
        chance = self.pool_stats.calibration(self.greedy, rank, member).read(raw)
        if chance < EDGE:
            chance = EDGE
        elif chance > 1.0 - EDGE:
            chance = 1.0 - EDGE
        raised = chance * self.odds[member]
        return raised / (raised + 1.0 - chance)
