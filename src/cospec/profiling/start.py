"""The time models that an engine starts with: kept ones, or a measurement of a few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cospec.policies.cost import ForwardCost, Sample, fit
from cospec.policies.round_cost import Costs
from cospec.profiling.measure import QUICK, STEPS, measure_forwards, measure_steps
from cospec.profiling.store import load, machine, save, weights
from cospec.protocols import Drafter, Model

SECONDS = 1.4  # for each of the two: three seconds in all with what goes before a point

_log = logging.getLogger(__name__)


def costs_at_start(target: Model, drafter: Drafter, folder: Path, how: Mapping[str, Any]) -> Costs:
    """Time models of the target's forward and the drafter's step.

    Args:
        folder: of the target's weights.
        how: what else they depend on: device, dtype, back ends, the drafter's configuration.
    """
    began = time.perf_counter()
    key = {**weights(folder), **machine(str(how.get("device", "auto"))), "how": dict(how)}
    forward = _kept({**key, "part": "target"}, lambda: measure_forwards(target, QUICK, SECONDS))
    step = _kept({**key, "part": "drafter"}, lambda: measure_steps(drafter, target.vocab_size, STEPS, SECONDS))
    taken = time.perf_counter() - began
    if taken > 0.2:
        _log.warning("measured this machine in %.1f s; the time model is kept for the next start", taken)
    return Costs(forward, step)


def _kept(key: Mapping[str, Any], measure: Callable[[], list[Sample]]) -> ForwardCost | None:
    found = load(key)
    if found is None and (samples := measure()):
        found = fit(samples)
        save(key, found)
    return found
