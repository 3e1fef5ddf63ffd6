"""``cospec bench accept`` and ``cospec bench roofline``: measure drafters and devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cospec.cli import bench_common as output
from cospec.cli import bench_options as bench
from cospec.cli import options
from cospec.cli.bench_options import grouped
from cospec.errors import InvalidInput

if TYPE_CHECKING:
    from cospec.bench.acceptance import Row

TEXTS = ("def mean(values):\n", "Question: How many", "It was a dark evening", "import os\n")
Drafters = Annotated[
    list[str],
    typer.Option(
        "--drafter",
        metavar="NAME=JSON",
        help="A name and its speculative_config, or a method; may be repeated.",
        show_default="draft_model",
    ),
]


@grouped
def accept(
    prompts: bench.PromptFlags,
    engine: bench.EngineFlags,
    results: bench.ResultFlags,
    drafter: Drafters = [],  # noqa: B006
    model: options.Model = "zoo",
    num_prompts: bench.NumPrompts = 30,
    output_len: bench.OutputLen = 128,
    temperature: Annotated[list[float], typer.Option(min=0, help="May be repeated.")] = [0.0],  # noqa: B006
) -> None:
    """Measure the acceptance of drafters.

    The table is by drafter, domain, temperature and position, with intervals over prompts.
    """
    output.require()
    from cospec.bench import acceptance as measured
    from cospec.config import EngineConfig

    to, texts, common = results.place(), prompts.take(num_prompts), engine.given(model)
    drafters: dict[str, Mapping[str, Any]] = dict(map(_drafter, drafter or ["draft_model"]))
    configs = {
        name: EngineConfig.build({**common, "speculative_config": speculative})
        for name, speculative in drafters.items()
    }
    rows: list[Row] = []
    with output.Bar(len(drafters)) as bar:
        for name, config in configs.items():
            bar.describe(name)
            rows += measured.measure(name, config, texts, temperature, output_len)
            bar.advance()
    _show_rows(rows)
    settings = {**common, "drafters": drafters, "num_prompts": num_prompts, "output_len": output_len}
    output.write(output.complete("accept", {**settings, "seed": prompts.seed}, {"runs": measured.as_runs(rows)}), to)


@grouped
def roofline(
    engine: bench.EngineFlags,
    results: bench.ResultFlags,
    model: Annotated[str, typer.Argument(help="zoo, zoo:NAME, a folder, a GGUF file, or a hub name.")] = "zoo",
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
    from cospec.models.checkpoint import resolve
    from cospec.models.loading import weights_dtype

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


def _drafter(text: str) -> tuple[str, Mapping[str, Any]]:
    """Parse ``NAME=JSON`` or a method's name. The default policy is ``fixed``, so that the drafter always drafts."""
    from cospec.config import read_json

    name, mark, value = text.partition("=")
    if not name or name.startswith("{"):
        raise InvalidInput("drafter", text, "NAME=JSON, or the name of a method")
    given = read_json(value, f"drafter {name}") if mark else {"method": name}
    return name, {"policy": "fixed", **given}


def _show_rows(rows: Iterable[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    head = (
        "drafter",
        "domain",
        "T",
        "prompts",
        "α",
        "of proposed",
        "mean length",
        "calls / token",
        "by position",
    )
    table = Table(*head, title="acceptance, with 95% intervals over prompts")
    for row in rows:
        places = " ".join("-" if one.value is None else f"{one.value:.2f}" for one in row.by_position)
        figures = (row.alpha, row.draft_acceptance_rate, row.mean_acceptance_length, row.calls_per_token)
        table.add_row(
            row.drafter, row.domain, f"{row.temperature:g}", str(row.prompts), *map(str, figures), places or "-"
        )
    Console().print(table)


def _show_roof(about: Mapping[str, Any], runs: Iterable[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    speeds = f"memory {about['bytes_per_s'] / 1e9:.1f} GB/s, products {about['flops_per_s'] / 1e9:.0f} GFLOP/s"
    table = Table(Column("per committed token", no_wrap=True), title=speeds)
    for name in ("MB", "MFLOP", "least ms", "target's ms", "all ms", "share, target", "share, all"):
        table.add_column(name, justify="right")
    keys = ("megabytes_per_token", "megaflop_per_token", "floor_ms_per_token", "target_ms_per_token", "ms_per_token")
    for run in runs:
        shares = (f"{run['share_of_target']:.0%}", f"{run['share_of_round']:.0%}")
        table.add_row(run["label"], *(f"{run[key]:.2f}" for key in keys), *shares)
    Console().print(table)
