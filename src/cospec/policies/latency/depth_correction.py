"""How far step times of each draft length are from the time model, learned from steps of several lengths.

A forward pass and a draft pass do not explain a whole step. Drafts evict the target's data from the processor's caches,
the kernels take rows in groups, and every draft has to be verified and committed. The time model follows the speed of
the machine within some twenty steps, so a run of steps of one length always fits. Only steps of different lengths that
were measured in the same moment show which length the model gets wrong. So each batch of observed steps with several
lengths is scaled to the model's speed as a whole, and each length keeps its own excess over the prediction.
"""

from __future__ import annotations

import numpy as np

from cospec.policies.latency.forward import Floats, Ints

LONGEST = 12  # depths that are told apart; longer drafts share the last excess
SIZES = 8  # excesses are kept for 1, 2 to 3, 4 to 7, ... requests
KEPT, UNSEEN = 0.99, 0.999  # weight of what is known of a length, per step of that length and of another
TRUST = 4.0  # steps of a length that the prediction counts for
ODD = 3.0  # times the prediction that a disturbed step counts for at most
LEAST, MOST = -0.6, 3.0  # bounds of an excess, in steps without drafts


class DepthCorrection:
    """Measured less predicted seconds by number of requests and draft length, in shares of a step without drafts."""

    def __init__(self) -> None:
        self._sums = np.zeros((SIZES, LONGEST + 1, 3))  # excess, seconds without drafts, steps

    def follow(
        self, kinds: tuple[Ints, Ints], seconds: Floats, predicted: Floats, plain: Floats, weights: Floats
    ) -> None:
        """Learn from steps ``[S]``.

        Args:
            kinds: the number of requests and the longest draft of each step, 0 for a step without drafts.
            seconds: measured.
            predicted: by the time model, all at the same speed of the machine.
            plain: predicted of the same steps without drafts.
            weights: how many steps each one counts for.
        """
        sizes, depths = _size(kinds[0]), np.minimum(kinds[1], LONGEST)
        bounded = np.minimum(seconds, ODD * predicted)
        for size in np.unique(sizes):
            own = sizes == size
            present, counts = np.unique(depths[own], return_counts=True)
            fade = np.full(LONGEST + 1, UNSEEN ** float(own.sum()))
            if len(present) == 1:
                self._sums[size] *= fade[:, None]
                continue
            fade[present] = KEPT**counts
            speed = float(weights[own] @ bounded[own]) / float(weights[own] @ predicted[own])
            rows = np.stack([bounded / speed - predicted, plain, np.ones(len(seconds))], 1) * weights[:, None]
            self._sums[size] *= fade[:, None]
            np.add.at(self._sums[size], depths[own], rows[own])

    def excess(self, requests: int) -> Floats:
        """``[LONGEST + 1]``: what a step with drafts of each length, 0 being none, takes more than predicted.

        In shares of a step without drafts. A draft length that was not run takes the excess of all drafts together.
        """
        sums = self._sums[int(_size(np.array(requests)))]
        drafts = _share(sums[1:].sum(0), 0.0)
        found = np.concatenate([[_share(sums[0], 0.0)], [_share(row, drafts) for row in sums[1:]]])
        return np.asarray(np.clip(found, LEAST, MOST))


def _share(sums: Floats, usual: float) -> float:
    """The share of ``sums [3]``, drawn towards the usual one by ``TRUST`` steps."""
    excess, plain, steps = sums.tolist()
    own = excess / plain if plain > 0 else 0.0
    return float((steps * own + TRUST * usual) / (steps + TRUST))


def _size(requests: Ints) -> Ints:
    return np.minimum(np.log2(np.maximum(requests, 1)).astype(np.int64), SIZES - 1)
