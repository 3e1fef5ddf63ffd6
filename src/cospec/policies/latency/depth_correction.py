"""Error of the time model per draft length, learned from steps of several lengths.

A forward pass and a draft pass do not explain a whole step. Drafts evict the target's data from the caches, kernels
process rows in groups, and every draft must be verified and committed. The time model follows the machine's speed
within some twenty steps, so a run of steps of one length always fits. Only steps of different lengths measured at the
same time show the model's error per length. So each batch of steps with several lengths is scaled as a whole to the
model's speed. Each length keeps its own excess over the prediction.
"""

from __future__ import annotations

import numpy as np

from cospec.policies.latency.forward import Floats, Ints, bounded

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
        self._excess: dict[int, Floats] = {}  # by size, since the latest ``follow``

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
        self._excess = {}
        place = _size(kinds[0]) * (LONGEST + 1) + np.minimum(kinds[1], LONGEST)
        limited = np.minimum(seconds, OUTLIER * predicted)
        counts, measured, expected, base, weight = (
            np.bincount(place, each, SIZES * (LONGEST + 1)).reshape(SIZES, LONGEST + 1)
            for each in (None, weights * limited, weights * predicted, weights * plain, weights)
        )  # sums by size and length
        present = counts > 0
        compared = present.sum(1, keepdims=True) > 1
        decay = np.where(present & compared, DECAY**counts, IDLE_DECAY ** counts.sum(1, keepdims=True))
        self._sums *= decay[:, :, None]
        speed = measured.sum(1, keepdims=True) / np.maximum(expected.sum(1, keepdims=True), 1e-12)
        excess = measured / np.where(compared, speed, 1.0) - expected
        self._sums += np.where(compared, [excess, base, weight], 0.0).transpose(1, 2, 0)

    def excess(self, requests: int) -> Floats:
        """Return the excess over the prediction for each draft length, 0 being none, ``[LONGEST + 1]``.

        The unit is a step without drafts. Lengths without steps take the excess of all drafts together.
        """
        size = min(max(requests, 1).bit_length() - 1, SIZES - 1)
        if size not in self._excess:
            sums, typical = self._sums[size], np.zeros(LONGEST + 1)
            typical[1:] = _shares(sums[1:].sum(0), 0.0)
            self._excess[size] = bounded(_shares(sums, typical), LEAST, MOST)
        return self._excess[size]


def _shares(sums: Floats, typical: Floats | float) -> Floats:
    """Return the shares of ``sums [..., 3]``, shrunk towards the ``typical`` shares by ``TRUST`` steps."""
    excess, plain, steps = sums.T
    return np.asarray((steps * excess / np.maximum(plain, 1e-12) + TRUST * typical) / (steps + TRUST))


def _size(requests: Ints) -> Ints:
    return np.minimum(np.log2(np.maximum(requests, 1)).astype(np.int64), SIZES - 1)
