"""Plots of results as SVG text. Each function takes a result and returns None without data."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cospec.bench.run_figures import against_first

Result = Mapping[str, Any]
SIZE = (6.4, 3.8)  # inches


def all_plots(result: Result) -> list[tuple[str, str]]:
    """Return titles and SVG of every plot that the result has data for."""
    found = ((title, draw(result)) for title, draw in PLOTS.items())
    return [(title, svg) for title, svg in found if svg is not None]


def latency_by_rate(result: Result) -> str | None:
    """Plot median and p99 of TTFT and TPOT over the request rate; saturated runs are hollow."""
    runs = [run for run in result["runs"] if run.get("request_rate") and "median_ttft_ms" in run]
    if not runs:
        return None
    runs.sort(key=lambda run: run["request_rate"])

    def draw(axes: Any) -> None:
        for metric, colour in (("ttft", "C0"), ("tpot", "C1"), ("e2el", "C2")):
            for statistic, style in (("median", "-"), ("p99", "--")):
                key = f"{statistic}_{metric}_ms"
                points = [(run["request_rate"], run[key], run["saturated"]) for run in runs if key in run]
                if not points:
                    continue
                axes.plot(*zip(*[point[:2] for point in points], strict=True), style, color=colour)
                for rate, value, saturated in points:
                    axes.plot(rate, value, "o", color=colour, mfc="white" if saturated else colour)
                axes.plot([], [], style, color=colour, label=f"{metric} {statistic}")
        axes.set(xlabel="requests/s (hollow: saturated)", ylabel="ms", yscale="log")
        axes.legend(fontsize="small")

    return _svg(draw)


def throughput_by_batch(result: Result) -> str | None:
    """Plot output tokens per second over the batch size."""
    runs = sorted((run for run in result["runs"] if "batch" in run), key=lambda run: run["batch"])
    if not runs:
        return None

    def draw(axes: Any) -> None:
        axes.plot([run["batch"] for run in runs], [run["output_throughput"] for run in runs], "o-")
        axes.set(xlabel="batch", ylabel="output tokens/s", ylim=(0, None))

    return _svg(draw)


def throughput_by_system(result: Result) -> str | None:
    """Plot output tokens per second of compared systems."""
    if "ratios" not in result:
        return None
    runs = result["runs"]

    def draw(axes: Any) -> None:
        bars = axes.barh([run["label"] for run in runs], [run["output_throughput"] for run in runs])
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.invert_yaxis()
        axes.set(xlabel="output tokens/s")
        axes.margins(x=0.12)

    return _svg(draw)


def ratios(result: Result) -> str | None:
    """Plot the speed relative to the baseline, with intervals."""
    rows = [row for row in against_first(result) if row["cost"] == "time_per_token" and row["low"] is not None]
    if not rows:
        return None

    def draw(axes: Any) -> None:
        for place, row in enumerate(rows):
            error = [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]]
            axes.errorbar(row["ratio"], place, xerr=error, fmt="o", color="C0", capsize=4)
        axes.axvline(1.0, color="grey", linewidth=1)
        axes.set_yticks(range(len(rows)), [row["system"] for row in rows])
        axes.invert_yaxis()
        axes.set(xlabel=f"speed relative to {rows[0]['baseline']} (95% interval)")
        axes.margins(y=0.3)

    return _svg(draw)


def acceptance_by_position(result: Result) -> str | None:
    """Plot the share of drafts whose token was accepted, by position."""
    runs = [run for run in result["runs"] if run.get("speculation", {}).get("acceptance_per_position")]
    if not runs:
        return None

    def draw(axes: Any) -> None:
        for run in runs:
            shares = run["speculation"]["acceptance_per_position"]
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=run["label"])
        axes.set(xlabel="position in the draft", ylabel="share accepted", ylim=(0, 1))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize="small")

    return _svg(draw)


def length_by_load(result: Result) -> str | None:
    """Plot the mean speculation length over the number of running requests, one point per metrics read."""
    runs = [run for run in result["runs"] if run.get("length_by_load")]
    if not runs:
        return None

    def draw(axes: Any) -> None:
        for run in runs:
            points = run["length_by_load"]
            xs, ys = [point["running"] for point in points], [point["length"] for point in points]
            axes.scatter(xs, ys, s=14, label=run["label"])
        axes.set(xlabel="running requests", ylabel="speculation length", ylim=(0, None))
        axes.legend(fontsize="small")

    return _svg(draw)


def roofline(result: Result) -> str | None:
    """Plot attained over attainable operations per second.

    ``result["roofline"]`` holds ``bytes_per_s``, ``flops_per_s`` and ``points`` of ``name``, ``intensity`` (operations
    per byte) and ``flops_per_s``.
    """
    data = result.get("roofline")
    if not data:
        return None
    points: Sequence[Mapping[str, Any]] = data["points"]
    knee = data["flops_per_s"] / data["bytes_per_s"]
    low = min([knee, *(point["intensity"] for point in points)]) / 4
    high = max([knee, *(point["intensity"] for point in points)]) * 4

    def draw(axes: Any) -> None:
        axes.plot(
            [low, knee, high], [low * data["bytes_per_s"], data["flops_per_s"], data["flops_per_s"]], color="grey"
        )
        for point in points:
            axes.plot(point["intensity"], point["flops_per_s"], "o", label=point["name"])
        axes.set(xlabel="operations per byte", ylabel="operations/s", xscale="log", yscale="log")
        axes.legend(fontsize="small")

    return _svg(draw)


PLOTS: Mapping[str, Callable[[Result], str | None]] = {
    "Speed of the systems": throughput_by_system,
    "Speed against the baseline": ratios,
    "Latency by request rate": latency_by_rate,
    "Throughput by batch": throughput_by_batch,
    "Acceptance by position": acceptance_by_position,
    "Speculation length by load": length_by_load,
    "Roofline": roofline,
}


def _svg(draw: Callable[[Any], None]) -> str:
    """Draw one figure with one pair of axes, without a display."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    axes.grid(alpha=0.3)
    page = io.BytesIO()
    FigureCanvasSVG(figure).print_svg(page, metadata={"Date": None})
    return page.getvalue().decode("utf-8")
