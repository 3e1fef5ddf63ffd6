"""Enumeration instead of sampling, as ``cospec verify`` does it."""

from __future__ import annotations

from cospec.bench.verify.oracle import (
    BranchingDraws,
    Law,
    Scaled,
    Trace,
    Uniform,
    Unsound,
    branching_race,
    enumerate_runs,
    total_variation,
)

__all__ = [
    "BranchingDraws",
    "Law",
    "Scaled",
    "Trace",
    "Uniform",
    "Unsound",
    "branching_race",
    "enumerate_runs",
    "total_variation",
]
