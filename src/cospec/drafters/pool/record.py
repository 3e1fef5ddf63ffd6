"""What a pool knows of one request, and how it learns from what was committed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cospec.drafters.calibration import Calibration
from cospec.drafters.combiners.job import Slate
from cospec.drafters.routing.choice import Judged
from cospec.drafters.routing.standing import Standing
from cospec.types import Commit

EDGE = 0.01  # no confidence is nearer to 0 or 1


@dataclass(slots=True)
class Trust:
    """Calibrated confidence, moved by how much better or worse a drafter does for one request than it usually does.

    Attributes:
        calibrations: ``[2][M]``, of first and of next best guesses, for requests of this kind: greedy, or drawn.
        odds: ``[M]``, what the odds are multiplied by.
    """

    calibrations: Seq[Seq[Calibration]]
    odds: Seq[float]

    def __call__(self, member: int, raw: float, rank: int = 0) -> float:
        """The chance that a token is committed when the one before it was; ``rank`` 1: of a next best guess."""
        chance = self.calibrations[rank][member].read(raw)
        if chance < EDGE:
            chance = EDGE
        elif chance > 1.0 - EDGE:
            chance = 1.0 - EDGE
        raised = chance * self.odds[member]
        return raised / (raised + 1.0 - chance)


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        base: committed tokens when the latest draft was made.
        slates: what everybody said about it, until the round is committed.
    """

    standing: Standing
    base: int = -1
    trust: Trust | None = None
    slates: Mapping[int, Slate] = field(default_factory=dict)

    def learn(self, commit: Commit) -> dict[int, Judged]:
        """Count every drafter's guesses against the committed tokens; all of them learn, whosever were verified.

        Returns:
            What each drafter did; empty when the commit does not continue the latest draft.
        """
        slates, trust = self.slates, self.trust
        self.slates = {}
        if trust is None or commit.base_len != self.base or not commit.tokens:
            return {}
        self.standing.fade(len(commit.tokens))
        self.standing.accepted = len(commit.path)
        found = {member: slate.judge(commit.tokens) for member, slate in slates.items()}
        for member, part in found.items():
            self.standing.saw(member, part.hits, part.seen)
            trust.calibrations[0][member].learn(part.lessons)
            if part.seconds:
                trust.calibrations[1][member].learn(part.seconds)
        return found
