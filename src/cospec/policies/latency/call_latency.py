"""Latency of one model's calls, learned from the calls.

A profile of the model alone would mislead: models that alternate evict each other's weights from the caches, and
threads fall asleep between calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from cospec.policies.latency.forward import ForwardLatency, LatencySample, fit

SAMPLES_PER_KIND = 9  # stored times per kind of call
MIN_SAMPLES = 3  # times of a kind, and kinds, that a fit needs
PRIOR = ForwardLatency(slopes=(0.1,), fixed=0.9)  # initial shape: each further row costs a tenth of a pass


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of a model.

    The first pass computes ``rows`` tokens of ``sequences`` requests. Each further pass computes one token per request.
    """

    rows: int
    sequences: int
    passes: int = 1


class CallLatency:
    """Seconds of calls by rows, sequences and passes; the median of each kind counts, because some calls are
    disturbed."""

    def __init__(self) -> None:
        self._times: dict[ModelCall, deque[float]] = {}
        self._cost = PRIOR

    def read(self, call: ModelCall, seconds: float) -> None:
        """Record the seconds of a call."""
        times = self._times.get(call)
        if times is None:
            times = self._times[call] = deque(maxlen=SAMPLES_PER_KIND)
        times.append(seconds)

    def fitted(self) -> ForwardLatency:
        """Return a fit of all recorded calls; the prior without calls."""
        firm = [_sample(call, times) for call, times in self._times.items() if len(times) >= MIN_SAMPLES]
        if len(firm) >= MIN_SAMPLES:
            return fit(firm, knees=())
        samples = [_sample(call, times) for call, times in self._times.items()]
        if not samples:
            return PRIOR
        return PRIOR.scaled(median(sample.seconds / PRIOR.predict(sample) for sample in samples))

    def learn(self) -> None:
        """Refit the model to the recorded calls."""
        self._cost = self.fitted()

    def price(self, call: ModelCall) -> float:
        """Return the predicted seconds of a call, as last fitted."""
        return call_seconds(self._cost, call)


def call_seconds(cost: ForwardLatency, call: ModelCall) -> float:
    """Return the seconds of a call: the first pass has all rows, each later pass has one row per sequence."""
    more = call.passes - 1
    return cost.seconds(0, call.rows, 0) + (more * cost.each(0, call.sequences) if more else 0.0)


def _sample(call: ModelCall, times: deque[float]) -> LatencySample:
    """Return a sample of equal passes, each with the mean number of rows.

    Costs per sequence count as costs per row. With one pass per call, a fit could not separate the cost of a call from
    the cost of a pass; long proposals then looked free.
    """
    rows = (call.rows + (call.passes - 1) * call.sequences) / call.passes
    return LatencySample(0, rows, 0, median(times), call.passes)
