"""The time models that an engine starts with: kept ones, or a measurement of a few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cospec.core.interfaces import Model, MultiStepRunner
from cospec.core.plugins import Drafter
from cospec.policies.latency.forward import ForwardLatency, LatencySample, fit
from cospec.policies.latency.online_fit import KNEES
from cospec.policies.latency.step import LatencyModels
from cospec.profiling.measure import START, measure_forwards, measure_multi_steps
from cospec.profiling.store import load, machine, save, weights

SECONDS = 2.6  # of measuring: three seconds in all with what goes before a point
ENOUGH = 2  # samples for each slope
WORTH_KEEPING = 0.2  # median error on its own samples; what fits worse was disturbed, and is measured again next time

_log = logging.getLogger(__name__)


def costs_at_start(
    target: Model,
    drafter: Drafter,
    folder: Path,
    how: Mapping[str, Any],
    drafts: str,
    burst: MultiStepRunner | None = None,
) -> LatencyModels:
    """Time models of the target's forward and the drafter's step, as they take turns.

    Args:
        folder: of the target's weights.
        how: what else both depend on: device, dtype, back ends.
        drafts: the drafter's configuration.
        burst: what runs whole rounds of the two, if anything does.
    """
    began = time.perf_counter()
    alone = drafter.capabilities.free or drafter.capabilities.single_pass  # look-ups and heads have no steps to measure
    key = {**weights(folder), **machine(str(how.get("device", "auto"))), "how": dict(how)}
    beside = key if alone else {**key, "drafter": drafts}
    forward, step = load({**beside, "of": "target"}), None if alone else load({**beside, "of": "drafter"})
    if forward is None or (step is None and not alone):
        _log.info("measuring what forwards take here, for up to %.0f s; the result is kept for the next start", SECONDS)
        if alone:
            forwards, steps = measure_forwards(target, START, SECONDS), list[LatencySample]()
        else:
            forwards, steps = measure_multi_steps(target, drafter, START, SECONDS, burst)
        forward, step = _keep({**beside, "of": "target"}, forwards), _keep({**beside, "of": "drafter"}, steps)
        _log.warning("measured what forwards take here, in %.1f s", time.perf_counter() - began)
    return LatencyModels(forward, step)


def _keep(key: Mapping[str, Any], samples: list[LatencySample]) -> ForwardLatency | None:
    if not samples:
        return None
    found = fitted(samples)
    if np.median(found.errors(samples)) <= WORTH_KEEPING:
        save(key, found)
    else:
        _log.warning("the time model was measured on a busy machine and is not kept; rounds will correct it")
    return found


def fitted(samples: list[LatencySample]) -> ForwardLatency:
    """A fit whose slope changes at every number of tokens that was measured, where samples suffice for that.

    Two knees at most are too few to say where drafts stop paying, and at other places than the kernels' own they say
    it wrongly.
    """
    tokens = sorted({sample.tokens for sample in samples})
    knees = [knee for knee in KNEES if knee in tokens[1:-1]]
    return fit(samples, knees if len(samples) > ENOUGH * len(knees) else None)
