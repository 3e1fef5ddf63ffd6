"""The time models at the start of an engine: stored fits, or a measurement of a few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cospec.core.interfaces import Model, MultiStepRunner
from cospec.core.plugin_base import Drafter
from cospec.policies.latency.forward import ForwardLatency, LatencySample, fit
from cospec.policies.latency.online_fit import KNEES
from cospec.policies.latency.step import LatencyModels
from cospec.profiling.measure import START, measure_forwards, measure_multi_steps
from cospec.profiling.store import load, machine, save, weights

SECONDS = 2.6  # seconds of measurement; three seconds in total with the preparation of points
ENOUGH = 2  # samples for each slope
WORTH_KEEPING = 0.2  # median error on its own samples; a worse fit was disturbed and is not stored

_log = logging.getLogger(__name__)


def costs_at_start(
    target: Model,
    drafter: Drafter,
    folder: Path,
    how: Mapping[str, Any],
    drafts: str,
    multi_step: MultiStepRunner | None = None,
) -> LatencyModels:
    """Return the time models of the target's forward and the drafter's pass, measured in turn.

    Args:
        folder: of the target's weights.
        how: other dependencies: device, dtype, back ends.
        drafts: the drafter's configuration.
        multi_step: runs whole steps of target and drafter, if available.
    """
    began = time.perf_counter()
    # Look-ups and heads have no passes to measure.
    alone = drafter.capabilities.costless or drafter.capabilities.single_pass
    key = {**weights(folder), **machine(str(how.get("device", "auto"))), "how": dict(how)}
    pair_key = key if alone else {**key, "drafter": drafts}
    forward, step = load({**pair_key, "of": "target"}), None if alone else load({**pair_key, "of": "drafter"})
    if forward is None or (step is None and not alone):
        _log.info(
            "measuring the latency of forwards for up to %.0f s; the result is stored for the next start", SECONDS
        )
        if alone:
            forwards, steps = measure_forwards(target, START, SECONDS), list[LatencySample]()
        else:
            forwards, steps = measure_multi_steps(target, drafter, START, SECONDS, multi_step)
        forward, step = _store({**pair_key, "of": "target"}, forwards), _store({**pair_key, "of": "drafter"}, steps)
        _log.info("measured the latency of forwards in %.1f s", time.perf_counter() - began)
    return LatencyModels(forward, step)


def _store(key: Mapping[str, Any], samples: list[LatencySample]) -> ForwardLatency | None:
    if not samples:
        return None
    found = fitted(samples)
    if np.median(found.errors(samples)) <= WORTH_KEEPING:
        save(key, found)
    else:
        _log.warning("the time model was measured on a busy machine and is not stored; steps will correct the model")
    return found


def fitted(samples: list[LatencySample]) -> ForwardLatency:
    """Fit with a knee at every measured number of tokens, if the samples suffice.

    Two knees are too few to find where drafts stop to pay. Knees at other places than the kernels' own give wrong
    answers.
    """
    tokens = sorted({sample.tokens for sample in samples})
    knees = [knee for knee in KNEES if knee in tokens[1:-1]]
    return fit(samples, knees if len(samples) > ENOUGH * len(knees) else None)
