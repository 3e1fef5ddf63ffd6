"""What a pool knows of one request, and how it learns from what was committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cospec.drafters.combiners.job import Slate
from cospec.drafters.pool.calibration import Calibration
from cospec.drafters.routing.choice import Judged
from cospec.drafters.routing.standing import Standing
from cospec.types import Commit


@dataclass(frozen=True, slots=True)
class Trust:
    """Calibrated confidence, moved by how much better or worse a drafter does for one request than it usually does.

    Attributes:
        odds: ``[M]``, what the odds are multiplied by.
    """

    calibration: Calibration
    greedy: bool
    odds: list[float]

    def __call__(self, member: int, raw: float) -> float:
        """The chance that a token is committed when the one before it was."""
        chance = self.calibration.read(member, self.greedy, raw)
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

    def learn(self, commit: Commit, calibration: Calibration) -> dict[int, Judged]:
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
            calibration.learn(member, trust.greedy, part.lessons)
        return found
