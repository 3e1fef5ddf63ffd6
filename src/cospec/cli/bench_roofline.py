"""``cospec bench roofline``: compares decoding with the device's bandwidth and FLOP rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from cospec.cli import bench_common as output
from cospec.cli import bench_options as bench
from cospec.cli import options
from cospec.cli.bench_options import grouped

TEXTS = ("def mean(values):\n", "Question: How many", "It was a dark evening", "import os\n")


@grouped
def roofline(
    engine: bench.EngineFlags,
    results: bench.ResultFlags,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="zoo, zoo:NAME, a folder, a GGUF file, or a hub name.")
    ] = "zoo",
    speculative_config: options.SpeculativeConfig = None,
    batch_size: bench.BatchSizes = [1, 8],  # noqa: B006
    output_len: bench.OutputLen = 96,
) -> None:
    """Compare decoding with the device's bandwidth and FLOP rate.

    Measures both, and the bytes and operations per token.
    """
    output.require()
    import torch

    from cospec.bench import roofline as roof
    from cospec.config import EngineConfig
    from cospec.models.loading import weights_dtype
    from cospec.models.model_folder import resolve

    to, common = results.place(), engine.given(model)
    ways: dict[str, Any] = {"plain": {"method": "off"}, "speculating": speculative_config}
    configs = {
        name: EngineConfig.build({**common, "speculative_config": speculative}) for name, speculative in ways.items()
    }
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    kind = "cuda" if engine.device != "cpu" and torch.cuda.is_available() else "cpu"
    plain = configs["plain"]
    dtype = torch.float32 if plain.quantization else weights_dtype(resolve(model), plain.dtype)
    before = roof.measure_device(kind, dtype)
    taken = {
        f"{name}, {size} at once": roof.watch(config, [TEXTS[n % len(TEXTS)] for n in range(size)], output_len)
        for name, config in configs.items()
        for size in batch_size
    }
    found = before.best(roof.measure_device(kind, dtype))
    runs = [{"label": label, **roof.figures(cost, rounds, found)} for label, (cost, rounds) in taken.items()]
    points = [{"name": run["label"], "intensity": run["intensity"], "flops_per_s": run["flops_per_s"]} for run in runs]
    about = {"bytes_per_s": found.bytes_per_s, "flops_per_s": found.flops_per_s, "points": points}
    _show_roof(about, runs)
    settings = {**common, "speculative_config": speculative_config, "output_len": output_len}
    output.write(output.complete("roofline", settings, {"runs": runs, "roofline": about}), to)


def _show_roof(about: Mapping[str, Any], runs: Iterable[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    speeds = f"memory {about['bytes_per_s'] / 1e9:.1f} GB/s, products {about['flops_per_s'] / 1e9:.0f} GFLOP/s"
    table = Table(Column("per committed token", no_wrap=True), title=speeds)
    for name in ("MB", "MFLOP", "least ms", "target's ms", "all ms", "share, target", "share, all"):
        table.add_column(name, justify="right")
    keys = ("megabytes_per_token", "megaflop_per_token", "floor_ms_per_token", "target_ms_per_token", "ms_per_token")
    for run in runs:
        shares = (f"{run['share_of_target']:.0%}", f"{run['share_of_step']:.0%}")
        table.add_row(run["label"], *(f"{run[key]:.2f}" for key in keys), *shares)
    Console().print(table)
