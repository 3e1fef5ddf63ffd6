"""Latency of a forward pass: T_fwd = α_M · N_context + γ_M · N_batched + δ_M (SmartSpec section 4.3).

On a CPU, and on a GPU from some batch size on, γ_M changes with N_batched: one slope per piece between *knees*. The
rows of one sequence share its overhead, so there is one more coefficient per sequence. All coefficients are fitted by
non-negative least squares on relative errors. So a step of one token counts as much as a step of a thousand.

CoSine's T_ssm and T_llm (equations 5 and 7) count the longest context of a batch for all requests. A forward reads each
context once, so N_context is their sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cospec.errors import InvalidInput

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KNEE_GAIN = 0.93  # a knee must reduce the residual to this share
MOST_KNEES = 2
GOOD_ENOUGH = 1e-3
ROUNDING = 1e-13  # relative size of a gradient that is rounding alone


class LatencySample(NamedTuple):
    """One measured call: cached tokens, computed tokens, sequences, seconds; each of ``passes`` equal passes has these
    tokens.
    """

    context: float
    tokens: float
    sequences: float
    seconds: float
    passes: float = 1.0


@dataclass(frozen=True, slots=True)
class ForwardLatency:
    """Seconds of one forward pass of one model on one machine.

    Attributes:
        context: per cached token, α_M.
        slopes: per computed token, γ_M, one per piece between the knees.
        knees: numbers of tokens where the slope changes, increasing.
        sequence: per sequence of a call, for any number of passes.
        fixed: per pass, δ_M.
        start: per call; a drafter's call makes several passes.

    Raises:
        InvalidInput: the number of slopes is wrong, knees do not increase, or a coefficient is not finite.
    """

    context: float = 0.0
    slopes: tuple[float, ...] = (0.0,)
    knees: tuple[float, ...] = ()
    sequence: float = 0.0
    fixed: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        if len(self.slopes) != len(self.knees) + 1:
            raise InvalidInput("slopes", self.slopes, f"one more than the knees, here {len(self.knees) + 1}")
        if any(after <= before for before, after in pairwise(self.knees)):
            raise InvalidInput("knees", self.knees, "numbers of tokens that rise")
        for name in ("context", "slopes", "knees", "sequence", "fixed", "start"):
            value = getattr(self, name)
            if not all(map(math.isfinite, value if isinstance(value, tuple) else (value,))):
                raise InvalidInput(name, value, "finite")

    def tokens(self, count: float) -> float:
        """Return the seconds of computing ``count`` tokens, without all other costs."""
        seconds, start = 0.0, 0.0
        for slope, end in zip(self.slopes, (*self.knees, float("inf")), strict=True):
            if count <= end:
                return seconds + slope * (count - start)
            seconds, start = seconds + slope * (end - start), end
        return seconds

    def each(self, context: float, tokens: float) -> float:
        """Return the seconds of a pass over ``tokens``, whose sequences have ``context`` cached tokens."""
        return self.context * context + self.tokens(tokens) + self.fixed

    def seconds(self, context: float, tokens: float, sequences: float, passes: float = 1.0) -> float:
        """Return the seconds of a call with ``passes`` equal passes."""
        return self.start + self.sequence * sequences + passes * self.each(context, tokens)

    def tokens_of_all(self, counts: Floats) -> Floats:
        """Return ``tokens`` of each of ``counts [S]``."""
        edges = [0.0, *self.knees, 1.0 + max([float(counts.max(initial=0.0)), *self.knees[-1:]])]
        seconds = [0.0]
        for slope, (start, end) in zip(self.slopes, pairwise(edges), strict=True):
            seconds.append(seconds[-1] + slope * (end - start))
        return np.asarray(np.interp(counts, edges, seconds))

    def table(self, most: int) -> Floats:
        """Return ``tokens(n)`` for n from 0 to ``most``, ``[most + 1]``."""
        return self.tokens_of_all(np.arange(most + 1.0))

    def at_knees(self, knees: Sequence[float]) -> ForwardLatency:
        """Return a model with other ``knees``: the same seconds at 0 and at each knee, linear in between."""
        edges = (0.0, *knees, 2.0 * max((1.0, *knees, *self.knees)))
        seconds = [self.tokens(edge) for edge in edges]
        slopes = np.diff(seconds) / np.diff(edges)
        return ForwardLatency(
            self.context, tuple(slopes.tolist()), tuple(map(float, knees)), self.sequence, self.fixed, self.start
        )

    def scaled(self, factor: float) -> ForwardLatency:
        """Return the model of a machine that is ``factor`` times as slow."""
        return ForwardLatency(
            self.context * factor,
            tuple(slope * factor for slope in self.slopes),
            self.knees,
            self.sequence * factor,
            self.fixed * factor,
            self.start * factor,
        )

    def of_all(
        self, context: Floats | float, tokens: Floats, sequences: Floats, passes: Floats | float = 1.0
    ) -> Floats:
        """Return ``seconds`` of each of ``S`` calls, ``[S]``."""
        each = self.context * context + self.tokens_of_all(tokens) + self.fixed
        return np.asarray(self.start + self.sequence * sequences + passes * each)

    def errors(self, samples: Sequence[LatencySample]) -> Floats:
        """Return |predicted - measured| / measured, ``[S]``."""
        found = [abs(self.predict(sample) - sample.seconds) / sample.seconds for sample in samples]
        return np.array(found)

    def predict(self, sample: LatencySample) -> float:
        """Return the predicted seconds of a call like ``sample``."""
        return self.seconds(sample.context, sample.tokens, sample.sequences, sample.passes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def coefficients(self) -> Floats:
        """The coefficients, ``[J]``, in the order of ``columns``."""
        return np.array([self.context, *self.slopes, self.sequence, self.fixed, self.start])

    def with_coefficients(self, values: Sequence[float]) -> ForwardLatency:
        """Return a model with the same knees and other ``coefficients``."""
        context, *slopes, sequence, fixed, start = map(float, values)
        return ForwardLatency(context, tuple(slopes), self.knees, sequence, fixed, start)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> ForwardLatency:
        """Restore a model from ``to_json``, whose tuples a file has made lists."""
        return cls(**{**given, "slopes": tuple(given["slopes"]), "knees": tuple(given["knees"])})


def fit(samples: Sequence[LatencySample], knees: Sequence[float] | None = None) -> ForwardLatency:
    """Fit the coefficients to ``samples``.

    Args:
        knees: where the slope may change; None searches the best places, at most two, and keeps those that help.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a cost cannot be fitted to no samples")
    data = np.array(samples, dtype=np.float64)
    if knees is not None:
        return _solve(data, tuple(knees))[0]
    best, residual = _solve(data, ())
    places = np.unique(data[:, 1])[1:-1]
    for count in range(1, MOST_KNEES + 1):
        if residual < GOOD_ENOUGH:
            break
        found = min((_solve(data, each) for each in combinations(places, count)), key=lambda it: it[1], default=None)
        if found is not None and found[1] < KNEE_GAIN * residual:
            best, residual = found
    return best


def columns(data: Floats, knees: Sequence[float]) -> Floats:
    """Return the factors of the coefficients, ``[S, J]``, of samples ``data [S, 5]``."""
    context, tokens, sequences, _, passes = data.T
    found = np.ones((len(data), len(knees) + 5))
    found[:, 0] = context * passes
    np.multiply(_pieces(tokens, knees), passes[:, None], out=found[:, 1:-3])
    found[:, -3], found[:, -2] = sequences, passes
    return found


def bounded(values: Floats, low: Floats | float, high: Floats | float) -> Floats:
    """Return ``values`` within bounds, in less time than ``np.clip`` takes for a few hundred values."""
    return np.asarray(np.minimum(np.maximum(values, low), high))


def middle(values: Floats) -> float:
    """Return the median of ``values [S]``, in less time than ``np.median`` takes for a few hundred values."""
    ordered = np.sort(values)
    return float(ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


def _pieces(tokens: Floats, knees: Sequence[float]) -> Floats:
    """Return the number of each row's tokens in each piece, ``[S, len(knees) + 1]``."""
    below = np.minimum(tokens[:, None], np.array([0.0, *knees, np.inf]))
    return np.asarray(below[:, 1:] - below[:, :-1])


def _solve(data: Floats, knees: tuple[float, ...]) -> tuple[ForwardLatency, float]:
    """Return the fit with given knees, and its residual: the root mean square of relative errors."""
    weighted = columns(data, knees) / data[:, 3:4]
    if np.ptp(data[:, 4]) == 0:
        weighted[:, -1] = 0.0  # a call and its passes cannot be separated
    size = np.maximum(np.abs(weighted).max(axis=0), 1e-30)  # scale columns equally for the solver
    found, residual = nonnegative_least_squares(weighted / size, np.ones(len(data)))
    shape = ForwardLatency(slopes=(0.0,) * (len(knees) + 1), knees=tuple(float(knee) for knee in knees))
    return shape.with_coefficients(found / size), float(residual) / len(data) ** 0.5


def nonnegative_least_squares(matrix: Floats, target: Floats) -> tuple[Floats, float]:
    """Return the ``x [J]`` >= 0 that minimizes ``|matrix x - target|``, and the minimum (Lawson and Hanson, 1974).

    scipy has this function too. Importing scipy's solvers takes half a second or more, in which an engine that refits
    while it serves would stop all requests.

    Args:
        matrix: ``[S, J]``.
        target: ``[S]``.
    """
    count = matrix.shape[1]
    found, free = np.zeros(count), np.zeros(count, np.bool_)
    rounding = ROUNDING * float(np.abs(matrix).sum(axis=0).max(initial=0.0) * np.abs(target).max(initial=0.0))
    for _ in range(3 * count):
        gradient = np.where(free, -np.inf, matrix.T @ (target - matrix @ found))
        if gradient.max(initial=-np.inf) <= rounding:
            break
        free[gradient.argmax()] = True
        while True:
            solved = np.zeros(count)
            solved[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = solved < 0.0
            if not negative.any():
                found = solved
                break
            shares = np.full(count, np.inf)  # of the way to ``solved``, up to which each unknown stays positive
            shares[negative] = found[negative] / (found - solved)[negative]
            first = int(shares.argmin())
            free[first] = False  # each pass removes an unknown, so the loop ends
            found = np.where(free, np.maximum(found + shares[first] * (solved - found), 0.0), 0.0)
    return found, float(np.linalg.norm(matrix @ found - target))
