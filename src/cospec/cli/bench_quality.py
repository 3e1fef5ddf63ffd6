"""``cospec bench quality``: accuracy on GSM8K and HumanEval, exact and with the blend ``adaptive``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cospec.cli import bench_common as output
from cospec.cli import bench_options as bench
from cospec.cli import options
from cospec.cli.bench_options import grouped

if TYPE_CHECKING:
    from cospec.bench.answer_accuracy import Task

ADAPTIVE = '{"method": "adaptive"}'


@grouped
def quality(
    engine: bench.EngineFlags,
    results: bench.ResultFlags,
    dataset_path: Annotated[Path, typer.Option(help="JSON lines of GSM8K or HumanEval, in their public formats.")],
    model: options.Model = "zoo",
    speculative_config: options.SpeculativeConfig = None,
    adaptive: Annotated[
        str, typer.Option(metavar="JSON", help="The blend to compare with exact speculation; off for none.")
    ] = ADAPTIVE,
    limit: Annotated[int | None, typer.Option(min=1, help="Tasks that are read.", show_default="all")] = None,
    output_len: bench.OutputLen = 512,
    seconds: Annotated[float, typer.Option(min=0.1, help="Most seconds of a program's tests.")] = 10.0,
    memory_mb: Annotated[int, typer.Option(min=64, help="Most memory of a program's tests.")] = 1024,
) -> None:
    """Measure the accuracy of answers, with its interval. Every task is completed greedily.

    Programs that the model writes run on this machine, in processes with limits of time and memory and without sockets.
    The limits are no security boundary.
    """
    from cospec.bench.answer_accuracy import read_tasks
    from cospec.bench.sandbox import SandboxLimits
    from cospec.config import read_json

    to, common = results.place(), engine.given(model)
    tasks = read_tasks(dataset_path, limit, SandboxLimits(seconds, memory_mb << 20))
    blends: dict[str, Any] = {"exact": None}
    if adaptive != "off":
        blends["adaptive"] = read_json(adaptive, "adaptive")
    runs = []
    for name, blend in blends.items():
        runs.append({"label": name, **_measure(tasks, common, speculative_config, blend, output_len)})
        typer.echo(f"{name}: {runs[-1]['text']}")
    settings = {**common, "dataset": dataset_path.name, "output_len": output_len, "blends": blends}
    output.write(output.complete("quality", settings, {"runs": runs}), to)


def _measure(
    tasks: Sequence[Task],
    common: Mapping[str, Any],
    speculative_config: Any,
    blend: Mapping[str, Any] | None,
    output_len: int,
) -> dict[str, Any]:
    from cospec.bench.answer_accuracy import measure
    from cospec.llm import LLM
    from cospec.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len)
    with LLM(speculative_config=speculative_config, ensemble=blend, **common) as llm:

        def write(prompts: Sequence[str]) -> list[str]:
            return [found.outputs[0].text for found in llm.generate(list(prompts), params)]

        accuracy, wrong = measure(tasks, write)
    low, high = accuracy.interval
    return {
        "text": str(accuracy), "accuracy": accuracy.right / accuracy.count, "low": low, "high": high, "wrong": wrong
    }  # fmt: skip
