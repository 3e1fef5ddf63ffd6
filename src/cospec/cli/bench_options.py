"""The options that the benchmarks share, as types, in the names of ``vllm bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DATA = "Prompts"
METRICS = "Metrics"
RESULTS = "Results"

DatasetPath = Annotated[
    list[Path],
    typer.Option(
        help="Spec-Bench, HumanEval, GSM8K, ShareGPT or plain prompts; the format is found out. May be repeated.",
        rich_help_panel=DATA,
    ),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="By turns from every domain.", rich_help_panel=DATA)]
OutputLen = Annotated[
    int, typer.Option("--output-len", "--max-tokens", min=1, help="Tokens per answer.", rich_help_panel=DATA)
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos/--no-ignore-eos", help="Write exactly --output-len tokens.", rich_help_panel=DATA),
]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=DATA)]
Seed = Annotated[int, typer.Option(help="Of prompts, arrivals, orders and resampling.", rich_help_panel=DATA)]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Folder, zoo or hub name that tokens are counted with; none is 'none'.", rich_help_panel=METRICS),
]
PercentileMetrics = Annotated[
    str, typer.Option(help="Which of ttft, tpot, itl and e2el to report.", rich_help_panel=METRICS)
]
MetricPercentiles = Annotated[str, typer.Option(help="Percentiles of each of them.", rich_help_panel=METRICS)]
Goodput = Annotated[
    list[str],
    typer.Option(metavar="METRIC:MS", help="Bounds of a good request, as ttft:200.", rich_help_panel=METRICS),
]
SaveResult = Annotated[
    bool, typer.Option("--save-result", help="Write the result as JSON and as HTML.", rich_help_panel=RESULTS)
]
ResultDir = Annotated[Path, typer.Option(help="Folder for results.", rich_help_panel=RESULTS)]
ResultFilename = Annotated[
    str | None, typer.Option(help="Name of the JSON file; the page's ends in .html.", rich_help_panel=RESULTS)
]
