"""``cospec bench accept`` and ``cospec bench roofline``: what a drafter and a device are worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cospec.cli import bench_options as bench
from cospec.cli import bench_output as output
from cospec.cli import options
from cospec.cli.options import present
from cospec.errors import InvalidInput

if TYPE_CHECKING:
    from cospec.bench.accept import Row

RESULTS = Path("results")
TEXTS = ("def mean(values):\n", "Question: How many", "It was a dark evening", "import os\n")
Drafters = Annotated[
    list[str],
    typer.Option("--drafter", metavar="NAME=JSON", help="A name and its speculative_config; may be repeated."),
]


def accept(
    dataset_path: bench.DatasetPath,
    drafter: Drafters = [],  # noqa: B006
    model: options.Model = "zoo",
    num_prompts: bench.NumPrompts = 30,
    output_len: bench.OutputLen = 128,
    temperature: Annotated[list[float], typer.Option(min=0, help="May be repeated.")] = [0.0],  # noqa: B006
    seed: bench.Seed = 0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    save_result: bench.SaveResult = False,
    result_dir: bench.ResultDir = RESULTS,
    result_filename: bench.ResultFilename = None,
) -> None:
    """Acceptance by drafter, domain, temperature and position, with intervals over prompts."""
    from cospec.bench import accept as measured
    from cospec.bench import datasets, report
    from cospec.config import EngineConfig

    prompts = datasets.sample(datasets.load_all(dataset_path), num_prompts, seed)
    common = present(model=model, dtype=dtype, device=device, threads=threads)
    drafters: dict[str, Mapping[str, Any]] = dict(map(_drafter, drafter or ["draft_model"]))
    rows: list[Row] = []
    with output.Bar(len(drafters)) as bar:
        for name, speculative in drafters.items():
            bar.describe(name)
            config = EngineConfig.build({**common, "speculative_config": speculative})
            rows += measured.measure(name, config, prompts, temperature, output_len)
            bar.advance()
    _show_rows(rows)
    to = output.place(save_result, result_dir, result_filename)
    settings = {**common, "drafters": drafters, "num_prompts": num_prompts, "output_len": output_len, "seed": seed}
    if to is not None:
        _save(report.complete("accept", _command(), settings, {"runs": measured.as_runs(rows)}), to)


def roofline(
    model: Annotated[str, typer.Argument(help="zoo, zoo:NAME, a folder, or a hub name.")] = "zoo",
    speculative_config: options.SpeculativeConfig = None,
    batch_size: Annotated[list[int], typer.Option(min=1, help="Prompts at once; may be repeated.")] = [1, 8],  # noqa: B006
    output_len: bench.OutputLen = 96,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    device: options.Device = None,
    threads: options.Threads = None,
    save_result: bench.SaveResult = False,
    result_dir: bench.ResultDir = RESULTS,
    result_filename: bench.ResultFilename = None,
) -> None:
    """Bandwidth and FLOP rate of the device, bytes and operations per token, and the share of them that is reached."""
    import torch

    from cospec.bench import report
    from cospec.bench import roofline as roof
    from cospec.config import EngineConfig

    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    common = present(model=model, dtype=dtype, quantization=quantization, device=device, threads=threads)
    if threads is not None:
        torch.set_num_threads(threads)
    found = roof.measure_device(kind)
    ways: dict[str, Any] = {"plain": {"method": "off"}, "speculating": speculative_config}
    runs = []
    for name, speculative in ways.items():
        for size in batch_size:
            config = EngineConfig.build({**common, "speculative_config": speculative})
            texts = [TEXTS[number % len(TEXTS)] for number in range(size)]
            label = f"{name}, {size} at once"
            runs.append({"label": label, **roof.measure(config, texts, output_len, found)})
    points = [{"name": run["label"], "intensity": run["intensity"], "flops_per_s": run["flops_per_s"]} for run in runs]
    about = {"bytes_per_s": found.bytes_per_s, "flops_per_s": found.flops_per_s, "points": points}
    _show_roof(about, runs)
    to = output.place(save_result, result_dir, result_filename)
    if to is not None:
        settings = {**common, "speculative_config": speculative_config, "output_len": output_len}
        _save(report.complete("roofline", _command(), settings, {"runs": runs, "roofline": about}), to)


def _drafter(text: str) -> tuple[str, Mapping[str, Any]]:
    """``NAME=JSON``, or a method's name by itself. Its length is fixed unless it says otherwise, so that it drafts."""
    from cospec.config import read_json

    name, mark, value = text.partition("=")
    if not name or name.startswith("{"):
        raise InvalidInput("drafter", text, "NAME=JSON, or the name of a method")
    given = read_json(value, f"drafter {name}") if mark else {"method": name}
    return name, {"policy": "fixed", **given}


def _command() -> str:
    import sys

    return output.command(sys.argv[1:])


def _save(result: Mapping[str, Any], to: Path) -> None:
    from cospec.bench import report

    for path in (to, to.with_suffix(".html")):
        report.save(result, path)
    print(f"Written to {to} and {to.with_suffix('.html')}.")


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
    from rich.table import Table

    speeds = f"memory {about['bytes_per_s'] / 1e9:.1f} GB/s, products {about['flops_per_s'] / 1e9:.0f} GFLOP/s"
    head = (
        "",
        "MB / token",
        "MFLOP / token",
        "least ms / token",
        "target's ms",
        "all ms",
        "share, target",
        "share, all",
    )
    table = Table(*head, title=speeds)
    keys = ("megabytes_per_token", "megaflop_per_token", "floor_ms_per_token", "target_ms_per_token", "ms_per_token")
    for run in runs:
        shares = (f"{run['share_of_target']:.0%}", f"{run['share_of_round']:.0%}")
        table.add_row(run["label"], *(f"{run[key]:.2f}" for key in keys), *shares)
    Console().print(table)
