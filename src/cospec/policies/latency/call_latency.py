"""What the calls of one model take, learned from the calls themselves.

A profile would say it before the first one, but for a model that runs alone: models that take turns read each other's
weights out of the cache, and threads fall asleep between them.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from cospec.core.stats import ModelCall
from cospec.policies.latency.forward import ForwardLatency, LatencySample, fit

KEPT = 9  # times of each kind of call
FEWEST = 3  # of a kind, and kinds, before they are believed
PRIOR = ForwardLatency(slopes=(0.1,), fixed=0.9)  # a shape to begin with: some more rows for a tenth of a pass each


class CallLatency:
    """Seconds of calls by their rows, sequences and passes; of each kind the median counts, as some are disturbed."""

    def __init__(self) -> None:
        self._times: dict[ModelCall, deque[float]] = {}
        self._cost = PRIOR

    def read(self, call: ModelCall, seconds: float) -> None:
        """A call took so long."""
        times = self._times.get(call)
        if times is None:
            times = self._times[call] = deque(maxlen=KEPT)
        times.append(seconds)

    def fitted(self) -> ForwardLatency:
        """What all that was read says; the prior where nothing was."""
        firm = [_sample(call, times) for call, times in self._times.items() if len(times) >= FEWEST]
        if len(firm) >= FEWEST:
            return fit(firm, knees=())
        samples = [_sample(call, times) for call, times in self._times.items()]
        if not samples:
            return PRIOR
        return PRIOR.scaled(median(sample.seconds / PRIOR.predict(sample) for sample in samples))

    def learn(self) -> None:
        """Take what was read into account."""
        self._cost = self.fitted()

    def price(self, call: ModelCall) -> float:
        """Seconds of a call, by what was learned."""
        return call_seconds(self._cost, call)


def call_seconds(cost: ForwardLatency, call: ModelCall) -> float:
    """Seconds of a call, whose first pass has all of its rows, and each later one a row per sequence."""
    more = call.passes - 1
    return cost.seconds(0, call.rows, 0) + (more * cost.each(0, call.sequences) if more else 0.0)


def _sample(call: ModelCall, times: deque[float]) -> LatencySample:
    """All passes as alike, each over the mean number of rows.

    What comes with a sequence counts as its rows': a call's own share could not be told from what each pass takes while
    there was one pass a call, and made long proposals look free.
    """
    rows = (call.rows + (call.passes - 1) * call.sequences) / call.passes
    return LatencySample(0, rows, 0, median(times), call.passes)
