"""How often draft tokens are accepted: α = accepted / (accepted + rejections), per sequence and for all.

Accepted / proposed, the usual figure, reads .39 at a true .7 with five tokens, since what stands behind a rejection was
never judged. A sequence's rate is drawn towards that of all sequences by ``SHRINK`` imagined judgements, and that one
towards the prior. Counts fade with every round, so a rate that is not observed returns to where nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cospec.core.types import Commit, DraftBudget

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRIOR, PRIOR_WEIGHT = 0.7, 4.0
SHRINK = 16.0  # fits what the first half of a text tells of the second: rates of the zoo's texts deviate by 0.1
FADE, FADE_ALL = 0.97, 0.99  # of a sequence's counts and of everybody's, per round with a judgement
UNSEEN, UNSEEN_ALL = 0.995, 0.998  # and per round without one
FADED = 4096  # rounds after which nothing is left of a count; nobody tells of sequences that were aborted


class AcceptanceRates:
    """Rates by sequence. Counts fade when they are next looked at, so a round costs what it judged and no more."""

    def __init__(self, prior: float = PRIOR) -> None:
        self.prior = prior
        self._counts: dict[str, tuple[float, float, int]] = {}  # accepted, rejected, and the round they stood so
        self._round = self._swept = 0
        self._accepted = self._rejected = 0.0

    @property
    def overall(self) -> float:
        """The rate of all sequences together."""
        return (self._accepted + self.prior * PRIOR_WEIGHT) / (self._accepted + self._rejected + PRIOR_WEIGHT)

    @property
    def tracked(self) -> int:
        """Number of sequences of which something is kept."""
        return len(self._counts)

    def rates(self, ids: Sequence[str]) -> Floats:
        """``[n]``: the rates of the sequences."""
        usual = self.overall
        return np.array([self._rate(self._counts.get(id), usual) for id in ids])

    def observe(self, rounds: Sequence[tuple[Sequence[Commit], Mapping[str, DraftBudget]]]) -> None:
        """Count the judgements of rounds; with each, how wide the levels of every draft were.

        Within one call the judgements of a sequence fade by their number, those of everybody by the round.
        """
        found: dict[str, list[float]] = {}  # accepted, rejected, rounds
        ended: list[str] = []
        for commits, given in rounds:
            self._round += 1
            accepted = rejected = 0.0
            judged = False
            for commit in commits:
                if commit.drafted:
                    judged = True
                    kept, lost = float(len(commit.path)), float(commit.rejected)
                    budget = given.get(commit.id)
                    if budget is not None and budget.widths:
                        kept, lost = self._per_token(len(commit.path), commit.rejected, budget.widths)
                    accepted += kept
                    rejected += lost
                    counts = found.get(commit.id)
                    if counts is None:
                        found[commit.id] = [kept, lost, 1]
                    else:
                        counts[0], counts[1], counts[2] = (
                            counts[0] * FADE + kept,
                            counts[1] * FADE + lost,
                            counts[2] + 1,
                        )
                if commit.finish is not None:
                    ended.append(commit.id)
            fade = FADE_ALL if judged else UNSEEN_ALL
            self._accepted = self._accepted * fade + accepted
            self._rejected = self._rejected * fade + rejected
        self._join(found)
        for id in ended:
            self._counts.pop(id, None)
        if self._round - self._swept >= FADED:
            self._swept = self._round
            self._counts = {id: counts for id, counts in self._counts.items() if self._round - counts[2] < FADED}

    def _join(self, found: Mapping[str, Sequence[float]]) -> None:
        """What a number of rounds told of each sequence, with what is known of it."""
        for id, (accepted, rejected, judged) in found.items():
            before = self._counts.get(id, (0.0, 0.0, self._round))
            fade = FADE**judged * UNSEEN ** max(0.0, self._round - before[2] - judged)
            self._counts[id] = before[0] * fade + accepted, before[1] * fade + rejected, self._round

    def _rate(self, counts: tuple[float, float, int] | None, usual: float) -> float:
        if counts is None:
            return usual
        fade = UNSEEN ** (self._round - counts[2])
        accepted, rejected = counts[0] * fade, counts[1] * fade
        return (accepted + SHRINK * usual) / (accepted + rejected + SHRINK)

    def _per_token(self, levels: int, failed: bool, widths: Sequence[int]) -> tuple[float, float]:
        """Judgements of single tokens that the levels of a tree stand for.

        A level of width w holds w tokens that are each right with α. One that failed had none right; of one that did
        not, wα / (1 − (1 − α)^w) were right in expectation (one step of expectation maximisation).
        """
        alpha, accepted, rejected = self.overall, 0.0, 0.0
        for width in widths[:levels]:
            right = width * alpha / (1.0 - (1.0 - alpha) ** width)
            accepted += right
            rejected += width - right
        if failed and levels < len(widths):
            rejected += widths[levels]
        return accepted, rejected
