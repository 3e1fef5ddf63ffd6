"""Error of the time model per draft length, learned from steps of several lengths.

A forward pass and a draft pass do not explain a whole step. Drafts evict the target's data from the caches, kernels
process rows in groups, and every draft must be verified and committed. The time model follows the machine's speed
within some twenty steps, so a run of steps of one length always fits. Only steps of different lengths measured at the
same time show the model's error per length. So each batch of steps with several lengths is scaled as a whole to the
model's speed, and each length keeps its own excess over the prediction.
"""

from __future__ import annotations

import numpy as np

from cospec.policies.latency.forward import Floats, Ints

LONGEST = 12  # distinct depths; longer drafts share the last excess
SIZES = 8  # separate excesses for 1, 2 to 3, 4 to 7, ... requests
DECAY, IDLE_DECAY = 0.99, 0.999  # weight of a length's past, per step of this length and of another
TRUST = 4.0  # steps that the prediction counts for
OUTLIER = 3.0  # times the prediction, the limit of a disturbed step
LEAST, MOST = -0.6, 3.0  # bounds of an excess, in steps without drafts


class DepthCorrection:
    """Measured minus predicted seconds by number of requests and draft length, relative to a step without drafts."""

    def __init__(self) -> None:
        self._sums = np.zeros((SIZES, LONGEST + 1, 3))  # excess, seconds without drafts, steps

    def follow(
        self, kinds: tuple[Ints, Ints], seconds: Floats, predicted: Floats, plain: Floats, weights: Floats
    ) -> None:
        """Learn from steps ``[S]``.

        Args:
            kinds: number of requests and longest draft of each step; 0 without drafts.
            seconds: measured.
            predicted: by the time model, all at the same speed of the machine.
            plain: predictions of the same steps without drafts.
            weights: weight of each step, in steps.
        """
        sizes, depths = _size(kinds[0]), np.minimum(kinds[1], LONGEST)
        bounded = np.minimum(seconds, OUTLIER * predicted)
        for size in np.unique(sizes):
            own = sizes == size
            present, counts = np.unique(depths[own], return_counts=True)
            decay = np.full(LONGEST + 1, IDLE_DECAY ** float(own.sum()))
            if len(present) == 1:
                self._sums[size] *= decay[:, None]
                continue
            decay[present] = DECAY**counts
            speed = float(weights[own] @ bounded[own]) / float(weights[own] @ predicted[own])
            rows = np.stack([bounded / speed - predicted, plain, np.ones(len(seconds))], 1) * weights[:, None]
            self._sums[size] *= decay[:, None]
            np.add.at(self._sums[size], depths[own], rows[own])

    def excess(self, requests: int) -> Floats:
        """Return the excess over the prediction for each draft length, 0 being none, ``[LONGEST + 1]``.

        The unit is a step without drafts. Lengths without steps take the excess of all drafts together.
        """
        sums = self._sums[int(_size(np.array(requests)))]
        drafts = _share(sums[1:].sum(0), 0.0)
        found = np.concatenate([[_share(sums[0], 0.0)], [_share(row, drafts) for row in sums[1:]]])
        return np.asarray(np.clip(found, LEAST, MOST))


def _share(sums: Floats, typical: float) -> float:
    """Return the share of ``sums [3]``, shrunk towards the typical share by ``TRUST`` steps."""
    excess, plain, steps = sums.tolist()
    own = excess / plain if plain > 0 else 0.0
    return float((steps * own + TRUST * typical) / (steps + TRUST))


def _size(requests: Ints) -> Ints:
    return np.minimum(np.log2(np.maximum(requests, 1)).astype(np.int64), SIZES - 1)
