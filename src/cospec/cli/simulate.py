"""``cospec simulate``: runs the engine on a virtual clock, for a scenario."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cospec.cli.output_paths import check_file, writing

WIDTH = 180  # width of the table without a terminal


def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.yaml", help="The scenario to simulate.")],
    output: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file; needs the extra 'bench'.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests per run.", show_default="the scenario's")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of every random choice.", show_default="the scenario's")
    ] = None,
) -> None:
    """Run the engine on a virtual clock, for a scenario.

    Scheduler, policies and execution modes are the engine's; acceptance is drawn, and times are computed.
    """
    from rich.console import Console

    from cospec.cli.options import present
    from cospec.simulation.results import draw
    from cospec.simulation.run import simulate as run
    from cospec.simulation.scenario import Scenario

    check_file(output, "output")
    check_file(plot, "plot", ".png")
    read = Scenario.read(scenario).model_copy(update=present(requests=requests, seed=seed))
    found = run(read, scenario.parent)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(_table(found))
    if output is not None:
        with writing(output, "output"):
            output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        with writing(plot, "plot"):
            draw(found, plot)


def _table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    head = (
        "variant",
        "load",
        "latency s",
        "p50",
        "p99",
        "TTFT s",
        "tokens/s",
        "k",
        "accepted",
        "batch",
        "tokens/step",
        "target idle",
        "drafters idle",
    )
    priced = any("price_per_million_tokens" in run for run in found["runs"])
    table = Table(*head, *(["price/M tokens"] if priced else []), box=None)
    for run in found["runs"]:
        latency, accepted = run["latency"], run["acceptance"]
        figures = (latency["mean"], latency["p50"], latency["p99"], run["ttft"]["mean"])
        table.add_row(
            run["variant"],
            f"{run['load']:g}",
            *(f"{figure:.3g}" for figure in figures),
            f"{run['throughput']:.0f}",
            f"{run['mean_k']:.2f}",
            "" if accepted is None else f"{accepted:.2f}",
            f"{run['mean_batch']:.1f}",
            f"{run['mean_batched_tokens']:.0f}",
            f"{run['target_idle']:.0%}",
            "" if run["drafters_idle"] is None else f"{run['drafters_idle']:.0%}",
            *([f"{run['price_per_million_tokens']:.3g}"] if priced else []),
        )
    return table
