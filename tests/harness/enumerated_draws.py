"""Enumeration instead of sampling, as ``cospec verify`` does it."""

from __future__ import annotations

from cospec.verify.enumerated_draws import (
    BranchingRandom,
    BranchTrace,
    OutputDistribution,
    Scaled,
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
    "BranchTrace",
    "Uniform",
    "Unsound",
    "branching_sample",
    "enumerate_runs",
    "total_variation",
]
