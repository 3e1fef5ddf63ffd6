"""Acceptance rates of draft tokens, α = accepted / (accepted + rejections), per sequence and overall.

Accepted / proposed, the common figure, shows .39 at a true rate of .7 with five tokens: tokens after a rejection were
never verified. A sequence's rate is shrunk towards the overall rate with the weight of ``SHRINK`` tokens; the overall
rate is shrunk towards the prior. Counts decay with every step, so a rate without observations returns to its prior.
"""

from __future__ import annotations

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
IDLE_DECAYS = np.array([IDLE_DECAY**steps for steps in range(2 * FORGET_AFTER)])


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
        return self._rates_at(ids, range(self._step, self._step + 1))[:, 0]

    def observe(self, steps: Sequence[tuple[Sequence[Commit], Mapping[str, DraftBudget]]]) -> None:
        """Count the verified tokens of steps, each with the budgets of its drafts.

        Within one call the counts of a sequence decay per verification, the overall counts per step.
        """
        found: dict[str, list[float]] = {}  # accepted, rejected, steps
        ended: list[str] = []
        fates: dict[Fate, list[float]] = {}  # drafts, and the sum of their rates
        by_level = self.levels.active
        rates = self._rates_over(steps) if by_level else {}
        for place, (commits, given) in enumerate(steps):
            self._step += 1
            accepted = rejected = 0.0
            verified = False
            for commit in commits:
                id = commit.id
                if commit.finish is not None:
                    ended.append(id)
                if not commit.drafted:
                    continue
                verified = True
                kept: float = len(commit.path)
                lost: float = commit.rejected
                budget = given.get(id)
                widths = () if budget is None else budget.widths
                if by_level:
                    key = widths, len(commit.path), commit.rejected
                    fate = fates.get(key)
                    if fate is None:
                        fate = fates[key] = [0.0, 0.0]
                    fate[0] += 1
                    fate[1] += rates[id][place]
                    if commit.ranks:
                        later = sum([rank > 0 for rank in commit.ranks])  # accepted after a wrong first sibling
                        kept, lost = kept - later, lost + later
                elif widths:
                    kept, lost = self._per_token(len(commit.path), commit.rejected, widths)
                accepted += kept
                rejected += lost
                counts = found.get(id)
                if counts is None:
                    counts = found[id] = [0.0, 0.0, 0]
                counts[0] = counts[0] * DECAY + kept
                counts[1] = counts[1] * DECAY + lost
                counts[2] += 1
            decay = DECAY_ALL if verified else IDLE_DECAY_ALL
            self._accepted = self._accepted * decay + accepted
            self._rejected = self._rejected * decay + rejected
        if fates:
            self.levels.observe(fates, len(steps))
        self._merge(found)
        self._forget(ended)

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

    def _rates_over(self, steps: Sequence[tuple[Sequence[Commit], object]]) -> dict[str, list[float]]:
        """Return the rates of the sequences of the next steps, in each of the steps."""
        ids = list({commit.id for commits, _ in steps for commit in commits})
        rates = self._rates_at(ids, range(self._step + 1, self._step + 1 + len(steps)))
        return dict(zip(ids, rates.tolist(), strict=True))

    def _rates_at(self, ids: Sequence[str], steps: range) -> Floats:
        """Return the rates of the sequences at ``steps``, ``[n, S]``, from the stored counts."""
        unknown = 0.0, 0.0, self._step
        counts = np.array([self._counts.get(id, unknown) for id in ids], dtype=np.float64).reshape(-1, 3)
        ages = np.arange(steps.start, steps.stop) - counts[:, 2:].astype(np.int64)
        decay = IDLE_DECAYS[np.minimum(ages, len(IDLE_DECAYS) - 1)]
        accepted, rejected = counts[:, :1] * decay, counts[:, 1:2] * decay
        found: Floats = (accepted + SHRINK * self.overall) / (accepted + rejected + SHRINK)
        return found

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
