"""How often draft tokens are accepted: α = accepted / (accepted + rejections), per sequence and for all.

Accepted / proposed, the usual figure, reads .39 at a true .7 with five tokens, since what stands behind a rejection was
never judged. A sequence's rate is drawn towards that of all sequences by ``SHRINK`` imagined judgements, and that one
towards the prior. Counts fade with every round, so a rate that is not observed returns to where nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from cospec.types import Budget, Commit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRIOR, PRIOR_WEIGHT, SHRINK = 0.6, 4.0, 6.0
FADE, FADE_ALL = 0.97, 0.99  # of a sequence's counts and of everybody's, per round with a judgement
UNSEEN, UNSEEN_ALL = 0.995, 0.998  # and per round without one


class Acceptance:
    """Rates by sequence, in arrays with a slot for each."""

    def __init__(self, prior: float = PRIOR) -> None:
        self.prior = prior
        self._slots: dict[str, int] = {}
        self._free = list(range(63, -1, -1))
        self._counts = np.zeros((2, 64))  # accepted, rejected
        self._accepted = self._rejected = 0.0

    @property
    def everybody(self) -> float:
        """The rate of all sequences together."""
        return (self._accepted + self.prior * PRIOR_WEIGHT) / (self._accepted + self._rejected + PRIOR_WEIGHT)

    def slots(self, ids: Seq[str]) -> Ints:
        """Where the sequences' counts are; new ones get a slot."""
        known = self._slots
        return np.array([known[id] if id in known else self._open(id) for id in ids], dtype=np.int64)

    def rates(self, slots: Ints) -> Floats:
        """``[n]``: the rates of the sequences in ``slots``."""
        accepted, rejected = self._counts[:, slots]
        return np.asarray((accepted + SHRINK * self.everybody) / (accepted + rejected + SHRINK))

    def observe(self, commits: Seq[Commit], given: Mapping[str, Budget]) -> None:
        """Count a round's judgements; ``given`` tells how wide the levels of each draft were."""
        self._counts *= UNSEEN
        slots, accepted, rejected = [], [], []
        for commit in commits:
            slot = self._slots.get(commit.id)
            if commit.drafted and slot is not None:
                widths = given[commit.id].widths if commit.id in given else ()
                kept, lost = float(len(commit.path)), float(commit.rejected)
                if widths:
                    kept, lost = self._per_token(len(commit.path), commit.rejected, widths)
                slots.append(slot)
                accepted.append(kept)
                rejected.append(lost)
        fade = FADE_ALL if slots else UNSEEN_ALL
        self._accepted = self._accepted * fade + sum(accepted)
        self._rejected = self._rejected * fade + sum(rejected)
        if slots:
            self._counts[:, slots] = self._counts[:, slots] * (FADE / UNSEEN) + (accepted, rejected)
        for commit in commits:
            if commit.finish is not None:
                self.forget(commit.id)

    def forget(self, id: str) -> None:
        """Take back a sequence's slot."""
        slot = self._slots.pop(id, None)
        if slot is not None:
            self._counts[:, slot] = 0.0
            self._free.append(slot)

    def _per_token(self, levels: int, failed: bool, widths: Seq[int]) -> tuple[float, float]:
        """Judgements of single tokens that the levels of a tree stand for.

        A level of width w holds w tokens that are each right with α. One that failed had none right; of one that did
        not, wα / (1 − (1 − α)^w) were right in expectation (one step of expectation maximisation).
        """
        alpha, accepted, rejected = self.everybody, 0.0, 0.0
        for width in widths[:levels]:
            right = width * alpha / (1.0 - (1.0 - alpha) ** width)
            accepted += right
            rejected += width - right
        if failed and levels < len(widths):
            rejected += widths[levels]
        return accepted, rejected

    def _open(self, id: str) -> int:
        if not self._free:
            size = self._counts.shape[1]
            self._counts = np.concatenate([self._counts, np.zeros((2, size))], axis=1)
            self._free = list(range(2 * size - 1, size - 1, -1))
        slot = self._slots[id] = self._free.pop()
        return slot
