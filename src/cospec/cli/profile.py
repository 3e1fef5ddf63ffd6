"""``cospec profile``: measures the latency of forwards on this machine, for policies and the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cospec.cli import options
from cospec.cli.options import present
from cospec.cli.output_paths import check_file, writing

HEAD = ("model", "points", "context ns/token", "token µs", "knees", "sequence µs", "fixed ms", "median error", "p90")


def profile(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="zoo, zoo:NAME, a folder, a GGUF file, or a hub name.")
    ],
    drafter: Annotated[
        list[str] | None, typer.Option(help="Also measure this model's steps as a drafter; may be repeated.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for samples, fits and errors.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG file of predicted and measured times; needs the extra 'bench'.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of measurement for each model.")] = 20.0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    threads: options.Threads = None,
    instruction_set: options.InstructionSet = None,
) -> None:
    """Measure models and fit the time model.

    The grid is over context, tokens and sequences. The fit's errors are printed.
    """
    from rich.console import Console
    from rich.table import Table

    from cospec.assembly.build import load_options
    from cospec.assembly.drafters import set_threads
    from cospec.config import EngineConfig
    from cospec.native.library import use_instruction_set
    from cospec.profiling.fit_errors import Profile
    from cospec.profiling.fit_errors import plot as draw
    from cospec.profiling.store import machine

    check_file(output, "output")
    check_file(plot, "plot", ".png")
    given = present(device=device, dtype=dtype, quantization=quantization, threads=threads)
    given |= present(kv_cache_dtype=kv_cache_dtype, instruction_set=instruction_set)
    config = EngineConfig.build(given)
    set_threads(config.threads)
    use_instruction_set(config.instruction_set)
    table, profiles = Table(*HEAD, box=None), []
    for name in models:
        profiles.append(Profile.of(name, _forwards(name, load_options(config), seconds)))
    for name in drafter or ():
        profiles.append(Profile.of(f"{name}, drafting", _steps(name, load_options(config), seconds)))
    for each in profiles:
        table.add_row(*_row(each))
    Console().print(table)
    if output is not None:
        found: dict[str, Any] = {"machine": machine(config.device), "profiles": [each.to_json() for each in profiles]}
        with writing(output, "output"):
            output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        with writing(plot, "plot"):
            draw(profiles, plot)


def _forwards(name: str, how: Any, seconds: float) -> Any:
    from cospec.models.loading import load_model, resolve
    from cospec.profiling.measure import MeasurementGrid, measure_forwards

    return measure_forwards(load_model(str(resolve(name)), how), MeasurementGrid(), seconds)


def _steps(name: str, how: Any, seconds: float) -> Any:
    from cospec.drafters.model import ModelDrafter
    from cospec.models.loading import load_model, resolve
    from cospec.profiling.measure import MeasurementGrid, measure_steps

    model = load_model(str(resolve(name)), how)
    return measure_steps(
        ModelDrafter(model), model.vocab_size, MeasurementGrid(tokens=(1, 2, 4, 8), chunks=()), seconds
    )


def _row(profile: Any) -> tuple[str, ...]:
    fitted = profile.fitted
    return (
        profile.name,
        str(len(profile.samples)),
        f"{fitted.context * 1e9:.1f}",
        " ".join(f"{slope * 1e6:.1f}" for slope in fitted.slopes),
        " ".join(f"{knee:.0f}" for knee in fitted.knees) or "-",
        f"{fitted.sequence * 1e6:.1f}",
        f"{fitted.fixed * 1e3:.2f}",
        f"{profile.error:.1%}",
        f"{profile.worst:.1%}",
    )
