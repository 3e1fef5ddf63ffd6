"""Enumeration instead of sampling, as ``cospec verify`` does it."""

from __future__ import annotations

from cospec.verify.oracle import (
    BranchingRandom,
    OutputDistribution,
    Scaled,
    Trace,
    Uniform,
    Unsound,
    branching_sample,
    enumerate_runs,
    total_variation,
)

__all__ = [
    "BranchingRandom",
    "OutputDistribution",
    "Scaled",
    "Trace",
    "Uniform",
    "Unsound",
    "branching_sample",
    "enumerate_runs",
    "total_variation",
]
