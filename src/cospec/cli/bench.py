"""``cospec bench``: measures engines and servers with your prompts at your load."""

from __future__ import annotations

from typing import Annotated

import typer

from cospec.cli import bench_common as output
from cospec.cli import bench_options as bench
from cospec.cli import options
from cospec.cli.bench_accept import accept
from cospec.cli.bench_options import grouped
from cospec.cli.bench_quality import quality
from cospec.cli.bench_record import record
from cospec.cli.bench_roofline import roofline
from cospec.cli.bench_serve import serve
from cospec.cli.options import present
from cospec.errors import InvalidInput

app = typer.Typer(help="Measure latency, throughput and acceptance; compare systems.", no_args_is_help=True)


@app.command()
@grouped
def latency(
    prompts: bench.PromptFlags,
    decoding: bench.DecodingFlags,
    engine: bench.EngineFlags,
    metrics: bench.MetricFlags,
    results: bench.ResultFlags,
    model: options.Model = "zoo",
    speculative_config: options.SpeculativeConfig = None,
    batch_size: bench.BatchSizes = [1],  # noqa: B006
    num_iters: Annotated[int, typer.Option(min=1, help="Counted batches of each size.")] = 5,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Uncounted batches before the counted ones.")] = 1,
) -> None:
    """Time one engine in this process at fixed batch sizes."""
    output.require()
    from cospec.bench.engine_system import EngineSystem
    from cospec.bench.latency import Batches, Bench
    from cospec.bench.token_counter import TokenCounter

    to, selection = results.place(), metrics.selection()
    config = engine.given(model) | present(speculative_config=speculative_config)
    system = EngineSystem.build("cospec", {**config, "max_num_seqs": max(64, *batch_size)})
    sizes = [Batches(size, num_iters, num_iters_warmup) for size in batch_size]
    texts = prompts.take(max(size.prompts for size in sizes))
    own = output.load_tokenizer(metrics.tokenizer) if metrics.tokenizer else None
    system.start()
    counter = TokenCounter(own if metrics.tokenizer else system.engine.tokenizer)
    with output.ProgressBar(sum(num_iters + num_iters_warmup for _ in sizes)) as bar:
        runner = Bench(system, decoding.params(prompts.seed), counter, bar.advance)
        runs = [runner.run(size, texts, selection) for size in sizes]
    settings = {"engine": config, "output_len": decoding.output_len, "temperature": decoding.temperature}
    output.finish("latency", {**settings, "token_count": counter.method}, {"runs": runs}, to)


app.command()(serve)


@app.command()
@grouped
def compare(
    systems: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=WHAT",
            help="The baseline first; WHAT is a URL, a JSON object, a JSON or YAML file, or a kind.",
        ),
    ],
    prompts: bench.PromptFlags,
    decoding: bench.DecodingFlags,
    metrics: bench.MetricFlags,
    results: bench.ResultFlags,
    model: options.Model = "zoo",
    num_prompts: bench.NumPrompts = 12,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 1,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of every batch.")] = 3,
    num_warmups: Annotated[int, typer.Option(min=0, help="Batches of each system before the first turn.")] = 1,
) -> None:
    """Compare systems in turns. The systems get the same prompts; ratios are paired, with intervals."""
    output.require()
    from cospec.bench import compare as comparing
    from cospec.bench.systems import SystemSpec, as_json
    from cospec.bench.token_counter import TokenCounter

    to, selection = results.place(), metrics.selection()
    specs = [SystemSpec.parse(text, model) for text in systems]
    names = [spec.name for spec in specs]
    if len(names) < 2 or len(set(names)) < len(names):
        raise InvalidInput("systems", ", ".join(names), "two or more systems with different names")
    built = [spec.build() for spec in specs]
    texts = prompts.take(num_prompts)
    counter = TokenCounter(output.load_tokenizer(metrics.tokenizer or model))
    schedule = comparing.ComparisonPlan(batch_size, repetitions, num_warmups, prompts.seed)
    with output.ProgressBar(len(built) * (num_warmups + len(schedule.pieces(texts)) * repetitions)) as bar:
        measured = comparing.compare(built, texts, decoding.params(prompts.seed), schedule, counter, bar.ran)
    settings = {
        "systems": {spec.name: as_json(spec) for spec in specs},
        "batch_size": batch_size,
        "num_prompts": num_prompts,
        "repetitions": repetitions,
        "output_len": decoding.output_len,
        "temperature": decoding.temperature,
        "seed": prompts.seed,
        "token_count": counter.method,
    }
    found = comparing.report(measured, selection, prompts.seed)
    output.finish("compare", settings, found, to)
    if any(run["failed"] for run in found["runs"]):
        raise typer.Exit(1)


app.command()(accept)
app.command()(quality)
app.command()(record)
app.command()(roofline)
