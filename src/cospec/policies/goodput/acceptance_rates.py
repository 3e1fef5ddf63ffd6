"""Acceptance rates of draft tokens, α = accepted / (accepted + rejections), per sequence and overall.

Accepted / proposed, the common figure, shows .39 at a true rate of .7 with five tokens: tokens after a rejection were
never verified. A sequence's rate is shrunk towards the overall rate with the weight of ``SHRINK`` tokens; the overall
rate is shrunk towards the prior. Counts decay with every step, so a rate without observations returns to its prior.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cospec.core.types import Commit, DraftBudget
from cospec.policies.goodput.level_rates import Fate, LevelRates

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRIOR, PRIOR_WEIGHT = 0.7, 4.0
SHRINK = 16.0  # fits the rates of the zoo's texts: halves of a text deviate by 0.1
DECAY, DECAY_ALL = 0.97, 0.99  # of a sequence's counts and of the overall counts, per step with verified tokens
IDLE_DECAY, IDLE_DECAY_ALL = 0.995, 0.998  # the same per step without verified tokens
FORGET_AFTER = 4096  # steps after which a count has vanished; aborted sequences are not reported

Outcomes = Mapping[str, Mapping[int, int]]
"""Number of drafts by sequence and by 2 · accepted levels + 1 if the next level was rejected."""


class AcceptanceRates:
    """Rates by sequence. Counts decay lazily, so the cost of a step is proportional to its verified drafts."""

    def __init__(self, prior: float = PRIOR, levels: LevelRates | None = None) -> None:
        self.prior, self.levels = prior, levels or LevelRates(by_level=False, by_width=False)
        self._counts: dict[str, tuple[float, float, int]] = {}  # accepted, rejected, and the step of these counts
        self._step = self._swept = 0
        self._accepted = self._rejected = 0.0

    @property
    def overall(self) -> float:
        """The rate of all sequences together."""
        return (self._accepted + self.prior * PRIOR_WEIGHT) / (self._accepted + self._rejected + PRIOR_WEIGHT)

    @property
    def tracked(self) -> int:
        """Number of sequences with stored counts."""
        return len(self._counts)

    def rates(self, ids: Sequence[str]) -> Floats:
        """Return the rates of the sequences, ``[n]``."""
        overall = self.overall
        return np.array([self._rate(id, overall) for id in ids], dtype=np.float64)

    def observe(self, steps: Sequence[tuple[Sequence[Commit], Mapping[str, DraftBudget]]]) -> None:
        """Count the verified tokens of steps, each with the budgets of its drafts.

        Within one call the counts of a sequence decay per verification, the overall counts per step.
        """
        found: dict[str, list[float]] = {}  # accepted, rejected, steps
        ended: list[str] = []
        runs: list[tuple[Outcomes, Mapping[str, DraftBudget]]] = []  # of steps with the same budgets
        overall, by_level, latest = self.overall, self.levels.active, None
        outcomes = _no_outcomes()
        widths: dict[str, tuple[int, ...]] = {}
        for commits, given in steps:
            if given is not latest:
                latest, outcomes = given, _no_outcomes()
                widths = {id: budget.widths for id, budget in given.items() if budget.widths}
                runs.append((outcomes, given))
            accepted: float = 0
            rejected: float = 0
            verified = False
            for commit in commits:
                id = commit.id
                if commit.finish is not None:
                    ended.append(id)
                if not commit.drafted:
                    continue
                verified = True
                levels = len(commit.path)
                kept: float = levels
                lost: float = commit.rejected
                if by_level:
                    outcomes[id][2 * levels + commit.rejected] += 1
                    if commit.ranks:
                        later = sum([rank > 0 for rank in commit.ranks])  # accepted after a wrong first sibling
                        kept, lost = kept - later, lost + later
                elif widths and id in widths:
                    kept, lost = self._per_token(levels, commit.rejected, widths[id])
                accepted += kept
                rejected += lost
                counts = found.get(id)
                if counts is None:
                    found[id] = [kept, lost, 1]
                else:
                    counts[0] = counts[0] * DECAY + kept
                    counts[1] = counts[1] * DECAY + lost
                    counts[2] += 1
            decay = DECAY_ALL if verified else IDLE_DECAY_ALL
            self._accepted = self._accepted * decay + accepted
            self._rejected = self._rejected * decay + rejected
        if by_level and found:
            self.levels.observe(self._fates(runs, overall), len(steps))
        self._step += len(steps)
        self._merge(found)
        self._forget(ended)

    def _fates(
        self, runs: Sequence[tuple[Outcomes, Mapping[str, DraftBudget]]], overall: float
    ) -> Mapping[Fate, Sequence[float]]:
        """Return the number of drafts and the sum of their rates before the steps, by fate."""
        found: dict[Fate, list[float]] = {}
        for outcomes, given in runs:
            for id, drafts in outcomes.items():
                widths, rate = given[id].widths if id in given else (), self._rate(id, overall)
                for outcome, number in drafts.items():
                    fate = found.setdefault((widths, *divmod(outcome, 2)), [0.0, 0.0])
                    fate[0] += number
                    fate[1] += number * rate
        return found

    def _forget(self, ended: Sequence[str]) -> None:
        """Drop the counts of sequences that ended, and now and then counts that have vanished."""
        for id in ended:
            self._counts.pop(id, None)
        if self._step - self._swept >= FORGET_AFTER:
            self._swept = self._step
            self._counts = {id: counts for id, counts in self._counts.items() if self._step - counts[2] < FORGET_AFTER}

    def _merge(self, found: Mapping[str, Sequence[float]]) -> None:
        """Merge new counts of each sequence into its stored counts."""
        for id, (accepted, rejected, verified) in found.items():
            before = self._counts.get(id, (0.0, 0.0, self._step))
            decay = DECAY**verified * IDLE_DECAY ** max(0.0, self._step - before[2] - verified)
            self._counts[id] = before[0] * decay + accepted, before[1] * decay + rejected, self._step

    def _rate(self, id: str, overall: float) -> float:
        """Return the rate of a sequence from its stored counts, given the rate of all."""
        accepted, rejected, step = self._counts.get(id, (0.0, 0.0, self._step))
        decay = IDLE_DECAY ** (self._step - step)
        return float((accepted * decay + SHRINK * overall) / ((accepted + rejected) * decay + SHRINK))

    def _per_token(self, levels: int, failed: bool, widths: Sequence[int]) -> tuple[float, float]:
        """Convert the verified levels of a tree to accepted and rejected tokens.

        Each of the w tokens of a level is right with probability α. A failed level has no right token. An accepted
        level has wα / (1 − (1 − α)^w) right tokens in expectation (one step of expectation maximisation). With rates by
        level, the rate is that of first siblings, see ``Commit.ranks``.
        """
        alpha, accepted, rejected = self.overall, 0.0, 0.0
        for width in widths[:levels]:
            right = width * alpha / (1.0 - (1.0 - alpha) ** width)
            accepted += right
            rejected += width - right
        if failed and levels < len(widths):
            rejected += widths[levels]
        return accepted, rejected


def _no_outcomes() -> defaultdict[str, defaultdict[int, int]]:
    return defaultdict(lambda: defaultdict(int))
