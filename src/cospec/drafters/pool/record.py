"""What a pool knows of one request, what it keeps of a round, and who works that out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from cospec.drafters.calibration import Calibration, cells
from cospec.drafters.combiners.session import Session
from cospec.drafters.routing.standing import Prior, Standing
from cospec.draws import Purpose
from cospec.types import Budget, Commit, Context, Draft

if TYPE_CHECKING:
    from cospec.drafters.pool.readable import Staff

NOVELTY_RATE = 0.05  # how far a draft moves the moving average
_WORD = 2**64
EDGE = 0.01  # no confidence is nearer to 0 or 1


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        words: what does not change, as ``DraftTask`` in ``csrc/spec/pool_batch.h`` begins with it.
        plain: no row of logits is edited or truncated.
        draws, keeps: it draws tokens; from a q of their own, which goes with the draft.
        base: committed tokens when the latest draft was made; -1 when that was committed, or there was none.
        said: what everybody said about it, as ``Work`` keeps it until the round is committed.
    """

    standing: Standing
    words: tuple[float, ...]
    plain: bool
    draws: bool
    keeps: bool
    base: int = -1
    said: Any = None

    @classmethod
    def of(cls, context: Context, members: int) -> Record:
        """A new one, for a pool of so many drafters."""
        standing, params = Standing(members), context.sampling
        draws = not params.greedy
        heat = params.temperature if draws else 0.0
        words = (standing.address, int(params.greedy), context.seed % _WORD, int(context.noise), heat)
        plain = not (params.edits_logits or (params.truncates and draws))
        return cls(standing, words, plain, draws, draws and context.noise is Purpose.DRAFT)


class Seat(NamedTuple):
    """One sequence that is drafted for in a round.

    Attributes:
        able: the drafters that may take part, as bits.
        most: how many of them at most, see ``Choice.most``.
    """

    context: Context
    budget: Budget
    record: Record
    able: int
    most: int | None


Given = tuple[int, int, Draft]  # the whole draft of a drafter for a sequence: its row, who made it


class Knowledge:
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
        self.prior = Prior(members)
        self.novelty = np.ones(2)

    def calibration(self, greedy: bool, rank: int, member: int) -> Calibration:
        """One of them."""
        return Calibration(self.calibrations[int(greedy), rank, member])


class Work(Protocol):
    """A pool's own work, for all sequences of a round: in Python, or in the native library, with the same bits."""

    @property
    def staff(self) -> Staff:
        """Who is in the pool, and by what it goes."""

    def choose(self, seats: Seq[Seat]) -> list[list[int]]:
        """``[M][R]``: how many tokens each drafter is to draft for each sequence; 0 where it does not take part."""

    def combine(self, seats: Seq[Seat], given: Seq[Given], session: Session) -> list[Draft]:
        """One draft for each sequence that anybody has something for.

        Args:
            seats: those of the latest ``choose``.
            given: whole drafts, those of one drafter after those of the other.
        """

    def learn(self, commits: Seq[tuple[Record, Commit]]) -> None:
        """Count every drafter's guesses against the committed tokens; all of them learn, whosever were verified.

        What they said is forgotten.
        """


@dataclass(slots=True)
class Trust:
    """Calibrated confidence, moved by how much better or worse a drafter does for one request than it usually does.

    Attributes:
        odds: ``[M]``, what the odds are multiplied by.
    """

    knowledge: Knowledge
    greedy: bool
    odds: Seq[float]

    def __call__(self, member: int, raw: float, rank: int = 0) -> float:
        """The chance that a token is committed when the one before it was; ``rank`` 1: of a next best guess."""
        chance = self.knowledge.calibration(self.greedy, rank, member).read(raw)
        if chance < EDGE:
            chance = EDGE
        elif chance > 1.0 - EDGE:
            chance = 1.0 - EDGE
        raised = chance * self.odds[member]
        return raised / (raised + 1.0 - chance)
