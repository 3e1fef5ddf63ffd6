"""Time models from the steps of a running engine, for simulations of this engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cospec.core.stats import StepStats
from cospec.policies.latency.forward import ForwardLatency, LatencySample, fit

KNEES = (2.0, 6.0, 16.0)  # tokens; steps cover token counts too unevenly for a search
MAX_STEPS = 2000  # steps per fit, evenly selected


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """One step of an engine.

    Attributes:
        fed: the drafter got new text, which its passes do not explain.
    """

    stats: StepStats
    fed: bool = False


def fit_steps(steps: Sequence[MeasuredSteps], of: Sequence[MeasuredSteps]) -> tuple[ForwardLatency, ForwardLatency]:
    """Fit verification (with all time outside of drafting) and drafting; drafting is zero without drafts.

    Args:
        steps: steps that determine the shape.
        of: steps that determine the level. A fit of relative errors is below the mean if some steps take much longer.

    Raises:
        ValueError: no steps.
    """
    drafts = _drafts(steps)
    return (
        _fit([_verification(one.stats) for one in steps], [_verification(one.stats) for one in of], KNEES),
        _fit(drafts, _drafts(of) or drafts, ()) if drafts else ForwardLatency(),
    )


def pace(steps: Sequence[MeasuredSteps], costs: tuple[ForwardLatency, ForwardLatency]) -> list[tuple[float, float]]:
    """Return the machine's speed step by step: predicted seconds by ``costs``, and the factor; the mean factor is 1.

    Slow phases last for many steps and delay single requests, which a mean does not show.
    """
    target, draft = costs
    found = []
    for one in steps:
        predicted = target.predict(_verification(one.stats))
        drafts = _drafts([one])
        predicted += draft.predict(drafts[0]) if drafts else one.stats.times.draft
        found.append((predicted, one.stats.total / predicted))
    mean = sum(one.stats.total for one in steps) / sum(seconds for seconds, _ in found)
    return [(seconds, factor / mean) for seconds, factor in found]


def _verification(stats: StepStats) -> LatencySample:
    seconds = stats.total - stats.times.draft
    return LatencySample(stats.context_tokens, stats.batched_tokens, stats.sequences, seconds)


def _drafts(steps: Sequence[MeasuredSteps]) -> list[LatencySample]:
    stats = [one.stats for one in steps if one.stats.depth and one.stats.drafts and not one.fed]
    return [LatencySample(s.context_tokens, s.proposed / s.depth, s.drafts, s.times.draft, s.depth) for s in stats]


def _fit(samples: Sequence[LatencySample], of: Sequence[LatencySample], knees: Sequence[float]) -> ForwardLatency:
    every = max(1, len(samples) // MAX_STEPS)
    found = fit(samples[::every], knees)
    predicted = sum(found.predict(sample) for sample in of)
    return found.scaled(float(np.sum([sample.seconds for sample in of])) / predicted)
