"""What a pool knows of one request, what it keeps of a round, and who works that out."""

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

NOVELTY_RATE = 0.05  # how far a draft moves the moving average
_WORD = 2**64
EDGE = 0.01  # no confidence is nearer to 0 or 1


@dataclass(slots=True)
class PoolRequestState:
    """One request.

    Attributes:
        words: what does not change, as ``DraftTaskStruct`` in ``csrc/spec/pool_batch.h`` begins with it.
        plain: no row of logits is edited or truncated.
        draws, keeps: it draws tokens; from a q of their own, which goes with the draft.
        base: committed tokens when the latest draft was made; -1 when that was committed, or there was none.
        said: what everybody said about it, as ``PoolImplementation`` keeps it until the round is committed.
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
        """A new one, for a pool of so many drafters."""
        standing, params = DrafterWeights(members), context.sampling
        draws = not params.greedy
        heat = params.temperature if draws else 0.0
        words = (standing.address, int(params.greedy), context.seed % _WORD, int(context.stream_kind), heat)
        plain = not (params.edits_logits or (params.truncates and draws))
        return cls(standing, words, plain, draws, draws and context.stream_kind is StreamKind.DRAFT)


class DraftTask(NamedTuple):
    """One sequence that is drafted for in a round.

    Attributes:
        able: the drafters that may take part, as bits.
        most: how many of them at most, see ``Choice.most``.
    """

    context: DraftContext
    budget: DraftBudget
    record: PoolRequestState
    able: int
    most: int | None


Given = tuple[int, int, Draft]  # the whole draft of a drafter for a sequence: its row, who made it


class PoolStats:
    """What a pool has learned of its drafters.

    Attributes:
        calibrations: ``[2, 2, M, 2, bins]``: of requests that draw and greedy ones, since a probability means something
            else for each; of first and of next best guesses; see ``calibration.cells``.
        prior: what a new request starts with.
        novelty: ``[2]``, of requests that draw and greedy ones: the share of drafted tokens that no other drafter had;
            a moving average.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.calibrations = cells(2, 2, members)
        self.address: int = self.calibrations.ctypes.data
        self.prior = WeightPrior(members)
        self.novelty = np.ones(2)

    def calibration(self, greedy: bool, rank: int, member: int) -> Calibration:
        """One of them."""
        return Calibration(self.calibrations[int(greedy), rank, member])


class PoolImplementation(Protocol):
    """A pool's own work, for all sequences of a round: in Python, or in the native library, with the same bits."""

    @property
    def pool_config(self) -> PoolConfig:
        """Who is in the pool, and by what it goes."""

    def choose(self, draft_tasks: Sequence[DraftTask]) -> list[list[int]]:
        """``[M][R]``: how many tokens each drafter is to draft for each sequence; 0 where it does not take part."""

    def combine(
        self, draft_tasks: Sequence[DraftTask], given: Sequence[Given], session: LockstepSession
    ) -> list[Draft]:
        """One draft for each sequence that anybody has something for.

        Args:
            seats: those of the latest ``choose``.
            given: whole drafts, those of one drafter after those of the other.
        """

    def learn(self, commits: Sequence[tuple[PoolRequestState, Commit]]) -> None:
        """Count every drafter's guesses against the committed tokens; all of them learn, whosever were verified.

        What they said is forgotten.
        """


@dataclass(slots=True)
class StatsCalibration:
    """Calibrated confidence, moved by how much better or worse a drafter does for one request than it usually does.

    Attributes:
        odds: ``[M]``, what the odds are multiplied by.
    """

    pool_stats: PoolStats
    greedy: bool
    odds: Sequence[float]

    def __call__(self, member: int, raw: float, rank: int = 0) -> float:
        """The chance that a token is committed when the one before it was; ``rank`` 1: of a next best guess."""
        chance = self.pool_stats.calibration(self.greedy, rank, member).read(raw)
        if chance < EDGE:
            chance = EDGE
        elif chance > 1.0 - EDGE:
            chance = 1.0 - EDGE
        raised = chance * self.odds[member]
        return raised / (raised + 1.0 - chance)
