"""Enumeration instead of sampling, as ``cospec verify`` does it."""

from __future__ import annotations

from cospec.verify.enumerated_draws import (
    BranchingRandom,
    BranchTrace,
    OutputDistribution,
    ScaledUniform,
    Uniform,
    Unsound,
    branching_sample,
    enumerate_runs,
    total_variation,
)

__all__ = [
    "BranchingRandom",
    "OutputDistribution",
    "ScaledUniform",
    "BranchTrace",
    "Uniform",
    "Unsound",
    "branching_sample",
    "enumerate_runs",
    "total_variation",
]
