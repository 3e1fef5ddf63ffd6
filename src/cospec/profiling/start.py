"""The time models that an engine starts with: kept ones, or a measurement of a few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cospec.policies.cost import ForwardCost, Sample, fit
from cospec.policies.round_cost import Costs
from cospec.profiling.measure import QUICK, STEPS, measure_forwards, measure_steps
from cospec.profiling.store import load, machine, save, weights
from cospec.protocols import Drafter, Model
from cospec.types import Offer

SECONDS = 1.3  # for each of the two: three seconds in all with what goes before a point
WORTH_KEEPING = 0.2  # median error on its own samples; what fits worse was disturbed, and is measured again next time

_log = logging.getLogger(__name__)


def costs_at_start(target: Model, drafter: Drafter, folder: Path, how: Mapping[str, Any], drafts: str) -> Costs:
    """Time models of the target's forward and the drafter's step.

    Args:
        folder: of the target's weights.
        how: what else both depend on: device, dtype, back ends.
        drafts: the drafter's configuration.
    """
    began = time.perf_counter()
    key = {**weights(folder), **machine(str(how.get("device", "auto"))), "how": dict(how)}
    forward = _kept(key, lambda: measure_forwards(target, QUICK, SECONDS))
    free = getattr(drafter, "offer", Offer()).free  # look-ups have no steps to measure
    step = None
    if not free:
        step = _kept({**key, "drafter": drafts}, lambda: measure_steps(drafter, target.vocab_size, STEPS, SECONDS))
    taken = time.perf_counter() - began
    if taken > 0.5:
        _log.warning("measured what forwards take here, in %.1f s", taken)
    return Costs(forward, step)


def _kept(key: Mapping[str, Any], measure: Callable[[], list[Sample]]) -> ForwardCost | None:
    found = load(key)
    if found is None and (samples := measure()):
        found = fit(samples)
        if np.median(found.errors(samples)) <= WORTH_KEEPING:
            save(key, found)
        else:
            _log.warning("the time model was measured on a busy machine and is not kept; rounds will correct it")
    return found
