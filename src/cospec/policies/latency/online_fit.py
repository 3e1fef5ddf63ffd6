"""An online fit of a time model: least squares with the measured fit as prior, and a refit when it is wrong.

Two things change: the machine's speed, quickly and for all steps alike, and the shape of the coefficients, slowly. So
every call is normalised by the current speed. The shape explains calls over a long time, and each coefficient is shrunk
towards its prior. The time of steps without drafts therefore stays known while drafts are made, and a slow
period of the machine does not distort the shape.

Kernels that process several rows at once make the cost of a token rise in steps. The position of these steps decides
the best draft length. So the slope may change at every number of tokens of a single sequence's step.
Above, the slope may change at increasingly distant numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from cospec.policies.latency.forward import Floats, ForwardLatency, LatencySample, bounded, columns, fit, middle

MEMORY, SPEED = 0.9995, 0.95  # weight of the past, per call: for the shape, and for the machine's speed
MEASURED, GUESSED = 10.0, 0.3  # calls that a prior coefficient counts for, measured or assumed
LINK = 3.0  # weight of equal errors of neighbouring slopes
LEAST = 0.3  # minimum share of a typical call that a coefficient of 0 may grow to
OUTLIER = 2.0  # times the prediction, or its inverse, the limit of a disturbed call
FAR = (
    1e3  # times as long as predicted at most: a call that should take no time would outweigh all others, and the solver
)
NEAR = 0.1  # relative error up to which a call counts in full; machines stall now and then
KNEES = tuple(map(float, (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128)))  # tokens
COARSE = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # of a fit to the few kinds of recent steps
SLOPES = slice(1, -3)  # of the coefficients
SPAN = (0.25, 4.0, 20.0)  # bounds of a coefficient as shares of its prior, and units above
WINDOW = 96  # steps that a refit uses
BETTER = 0.7  # a refit must reduce the error to this share
ANCHOR = 8  # points of the old fit that a new fit keeps, where recent steps show nothing


class OnlineFit:
    """One fit and its updates; ``cost`` is the current model.

    Args:
        trust: calls that each prior coefficient counts for.
    """

    def __init__(self, fitted: ForwardLatency, trust: float = GUESSED) -> None:
        self._trust = trust
        self._observed = np.zeros((0, 5))  # latest calls
        self._start(fitted)

    def _start(self, fitted: ForwardLatency) -> None:
        self.fitted = self.cost = fitted.at_knees(sorted({*KNEES, *fitted.knees}))
        self._known = self._shape = self.cost.coefficients
        size = len(self._known)
        self._unit: Floats | None = None  # seconds per unit of each unknown
        self._prior = np.zeros(size)  # the known coefficients in these units
        self._matrix, self._vector = np.zeros((size, size)), np.zeros(size)
        # Slowdown relative to the shape; 0 until the first calls, which may be cold.
        self._level = 1.0 if self._trust == MEASURED else 0.0
        steps = np.diff(np.eye(size)[SLOPES], axis=0)
        self._ties = self._trust * (np.diag(_widths(self.cost)) + LINK * steps.T @ steps)

    @property
    def measured(self) -> bool:
        """Whether the fit, or its speed, comes from measured calls."""
        return self._level > 0.0

    def follow(self, data: Floats) -> None:
        """Learn from measured calls ``[S, 5]``, columns as in ``LatencySample``, the oldest first."""
        if not len(data):
            return
        self._observed = np.concatenate([self._observed, data])[-WINDOW:]
        x, seconds = columns(data, self.fitted.knees), data[:, 3]
        if self._unit is None:
            self._unit = _units(x, self._known, data)
            self._prior = np.divide(self._known, self._unit, out=self._prior, where=self._unit > 0)
        shaped = np.maximum(x @ self._shape, np.maximum(seconds / FAR, 1e-12))
        slow = seconds / shaped
        level = self._level or middle(slow)
        usual = bounded(slow / level, 1 / OUTLIER, OUTLIER)
        weight = NEAR / np.maximum(NEAR, np.abs(usual - 1.0))
        now = level * float(weight @ usual / weight.sum())
        self._level = level = level + (1.0 - SPEED ** len(data)) * (now - level)
        ratio, root, keep = bounded(slow / level, 1 / OUTLIER, OUTLIER), np.sqrt(weight), MEMORY ** len(data)
        z = x * self._unit * (root / shaped)[:, None]
        self._matrix = keep * self._matrix + z.T @ z
        self._vector = keep * self._vector + (root * ratio) @ z
        given = self._matrix + self._ties, self._vector + self._ties @ self._prior
        solved = np.asarray(np.linalg.solve(*given), dtype=np.float64)
        low, high, above = SPAN
        self._shape = bounded(solved, low * self._prior, high * self._prior + above) * self._unit
        self.cost = self.fitted.with_coefficients((level * self._shape).tolist())

    def refit(self) -> bool:
        """Fit again to recent calls and keep the new fit if it is much better; the old fit covers all other calls.

        The old shape is compared at the current speed, because a slow machine is no reason to drop the shape. On a
        machine that stalls, every model fails on most steps, and a fit to these steps would be worse.
        """
        if len(self._observed) < WINDOW // 2:
            return False
        observed = [LatencySample(*row) for row in self._observed.tolist()]
        found = fit([*observed, *_anchors(self.cost, observed)], COARSE)
        speed = median(sample.seconds / self.cost.predict(sample) for sample in observed)
        if np.median(found.errors(observed)) >= BETTER * np.median(self.cost.scaled(speed).errors(observed)):
            return False
        self._trust = GUESSED
        self._start(found)
        return True


def _widths(cost: ForwardLatency) -> Floats:
    """Return how strongly each prior coefficient holds, ``[J]``; slopes of narrow pieces by their width in
    doublings."""
    edges = np.array([0.5 * cost.knees[0], *cost.knees, 2.0 * cost.knees[-1]])
    found = np.ones(len(cost.coefficients))
    found[SLOPES] = np.minimum(1.0, np.log2(edges[1:] / edges[:-1]))
    return found


def _units(x: Floats, known: Floats, data: Floats) -> Floats:
    """Return the seconds per unit of each unknown, ``[J]``; 0 for coefficients that the data do not determine."""
    typical = x.mean(axis=0)
    least = np.divide(LEAST * float((x @ known).mean()), typical, out=np.zeros_like(known), where=typical > 0)
    found = np.maximum(known, least)
    if not data[:, 4].max() > 1 and known[-1] == 0:
        found[-1] = 0.0  # one pass per call: the cost of a pass includes the start
    found[SLOPES] = found[SLOPES].max()
    return np.asarray(found)


def _anchors(cost: ForwardLatency, observed: Sequence[LatencySample]) -> list[LatencySample]:
    """Return points of the fit around the observed calls, corrected by the error there."""
    off = median(sample.seconds / cost.predict(sample) for sample in observed)
    *centre, _, passes = [median(column) for column in zip(*observed, strict=True)]
    found = []
    for n in range(ANCHOR):
        context, tokens, sequences = (x * (0.25 if n >> bit & 1 else 4.0) for bit, x in enumerate(centre))
        seconds = off * cost.seconds(context, tokens, sequences, passes)
        found.append(LatencySample(context, tokens, sequences, seconds, passes))
    return found
