"""Plots of a simulation's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cospec.errors import InvalidInput, words


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw latency and length over load for several loads, and length over time at the highest load.

    Raises:
        InvalidInput: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput(
            "plot", words("given without matplotlib"), "absent, or with the package: cospec[bench]"
        ) from None
    runs = found["runs"]
    loads = sorted({run["load"] for run in runs})
    figure = Figure(figsize=(13, 4), layout="constrained")
    latency, length, time = figure.subplots(1, 3)
    for variant in dict.fromkeys(run["variant"] for run in runs):
        own = sorted((run for run in runs if run["variant"] == variant), key=lambda run: float(run["load"]))
        latency.plot([run["load"] for run in own], [run["latency"]["mean"] for run in own], "o-", label=variant)
        length.plot([run["load"] for run in own], [run["mean_k"] for run in own], "o-", label=variant)
        series = own[-1]["series"]
        time.plot(series["time"], series["k"], label=variant)
    latency.set(xlabel="load", ylabel="mean latency, s", yscale="log")
    length.set(xlabel="load", ylabel="tokens drafted per sequence and step")
    time.set(xlabel=f"time at load {loads[-1]:g}, s", ylabel="tokens drafted per sequence and step")
    latency.legend()
    figure.savefig(path, dpi=120)
