"""How far step times of each draft length are from the time model, learned from steps of several lengths.

A forward pass and a draft pass do not explain a whole step. Drafts evict the target's data from the processor's caches,
the kernels take rows in groups, and every draft has to be verified and committed. The time model follows the speed of
the machine within some twenty steps, so a run of steps of one length always fits. Only steps of different lengths that
were measured in the same moment show which length the model gets wrong. So each batch of observed steps with several
lengths is scaled to the model's speed as a whole, and each length keeps its own ratio of measured to predicted seconds.
"""

from __future__ import annotations

import numpy as np

from cospec.policies.cost import Floats, Ints

LONGEST = 12  # depths that are told apart; longer drafts share the last ratio
SIZES = 8  # ratios are kept for 1, 2 to 3, 4 to 7, ... requests
KEPT, UNSEEN = 0.99, 0.999  # weight of what is known of a length, per step of that length and of another
TRUST = 4.0  # steps of a length that the prediction counts for
ODD = 3.0  # times the prediction that a disturbed step counts for at most
LEAST, MOST = 0.5, 2.0  # bounds of a ratio


class DepthCorrection:
    """Ratios of measured to predicted seconds, by number of requests and draft length."""

    def __init__(self) -> None:
        self._sums = np.zeros((SIZES, LONGEST + 1, 3))  # measured, predicted, steps

    def follow(self, kinds: tuple[Ints, Ints], seconds: Floats, predicted: Floats, weights: Floats) -> None:
        """Learn from steps ``[S]``.

        Args:
            kinds: the number of requests and the longest draft of each step, 0 for a step without drafts.
            seconds: measured.
            predicted: by the time model, all at the same speed of the machine.
            weights: how many steps each one counts for.
        """
        sizes, depths = _size(kinds[0]), np.minimum(kinds[1], LONGEST)
        for size in np.unique(sizes):
            own = sizes == size
            present, counts = np.unique(depths[own], return_counts=True)
            unseen = UNSEEN ** float(own.sum())
            if len(present) == 1:
                self._sums[size] *= unseen
                continue
            fade = np.full(LONGEST + 1, unseen)
            fade[present] = KEPT**counts
            usual = float(weights[own] @ predicted[own])
            speed = float(weights[own] @ np.minimum(seconds, ODD * predicted)[own]) / usual
            measured = np.minimum(seconds / speed, ODD * predicted)
            rows = np.stack([measured, predicted, np.ones(len(seconds))], 1) * weights[:, None]
            self._sums[size] *= fade[:, None]
            np.add.at(self._sums[size], depths[own], rows[own])

    def ratios(self, requests: int) -> Floats:
        """``[LONGEST + 1]``: measured over predicted seconds of a step with drafts of each length, 0 being none.

        A draft length that was not run takes the ratio of all drafts together.
        """
        sums = self._sums[int(_size(np.array(requests)))]
        if not sums[:, 2].any():
            return np.ones(LONGEST + 1)
        drafts = _ratio(sums[1:].sum(0), np.ones(()))
        found = np.concatenate([_ratio(sums[:1], np.ones(1)), _ratio(sums[1:], np.full(LONGEST, drafts))])
        return np.asarray(np.clip(found, LEAST, MOST))


def _ratio(sums: Floats, usual: Floats) -> Floats:
    """Ratios of ``sums [..., 3]``, drawn towards the usual ones by ``TRUST`` steps."""
    measured, predicted, steps = np.moveaxis(sums, -1, 0)
    own = np.divide(measured, predicted, out=np.ones_like(measured), where=predicted > 0)
    return np.asarray((steps * own + TRUST * usual) / (steps + TRUST))


def _size(requests: Ints) -> Ints:
    return np.minimum(np.log2(np.maximum(requests, 1)).astype(np.int64), SIZES - 1)
