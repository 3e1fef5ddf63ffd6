"""The errors of a time model on held-out points: figures, JSON, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cospec.errors import ModelError
from cospec.policies.latency.forward import ForwardLatency, LatencySample, fit


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured model.

    Attributes:
        fitted: the fit to all samples.
        held_out: the samples outside of the fit ``checked``.
        checked: the fit to the other samples.
    """

    name: str
    samples: tuple[LatencySample, ...]
    fitted: ForwardLatency
    held_out: tuple[LatencySample, ...]
    checked: ForwardLatency

    @classmethod
    def of(cls, name: str, samples: Sequence[LatencySample]) -> Profile:
        """Hold out every third point, fit the others, then fit all points.

        Raises:
            ModelError: fewer than six points were measured.
        """
        if len(samples) < 6:
            raise ModelError(f"{name} gave {len(samples)} measured points within the time; a fit needs 6 or more")
        held = tuple(samples[2::3])
        rest = [sample for place, sample in enumerate(samples) if place % 3 != 2]
        return cls(name, tuple(samples), fit(samples), held, fit(rest))

    @property
    def error(self) -> float:
        """Median relative error on held-out points."""
        return float(np.median(self.checked.errors(self.held_out)))

    @property
    def worst(self) -> float:
        """90th percentile of the relative error."""
        return float(np.quantile(self.checked.errors(self.held_out), 0.9))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fit": self.fitted.to_json(),
            "held_out": {"points": len(self.held_out), "median_error": self.error, "p90_error": self.worst},
            "samples": [sample._asdict() for sample in self.samples],
        }


def plot(profiles: Sequence[Profile], path: Path) -> None:
    """Plot predicted over measured milliseconds of the held-out points, one panel per model.

    Raises:
        ModelError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ModelError("plots need matplotlib: pip install 'cospec[bench]'") from None
    figure = Figure(figsize=(4.5 * len(profiles), 4.2), layout="constrained")
    for axes, profile in zip(figure.subplots(1, len(profiles), squeeze=False)[0], profiles, strict=True):
        for label, points, mark in (
            ("fitted", set(profile.samples) - set(profile.held_out), "."),
            ("held out", profile.held_out, "o"),
        ):
            measured = np.array([sample.seconds for sample in points]) * 1e3
            predicted = np.array([profile.checked.predict(sample) for sample in points]) * 1e3
            axes.loglog(measured, predicted, mark, label=label, alpha=0.8)
        ends = [min(s.seconds for s in profile.samples) * 1e3, max(s.seconds for s in profile.samples) * 1e3]
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.set(
            xlabel="measured, ms", ylabel="predicted, ms", title=f"{profile.name}: median error {profile.error:.1%}"
        )
        axes.legend()
    figure.savefig(path, dpi=120)
