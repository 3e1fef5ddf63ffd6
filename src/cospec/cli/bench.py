"""``cospec bench``: what an engine or a server does with prompts that are like yours, at a load that is like yours."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cospec.cli import bench_options as bench
from cospec.cli import bench_output as output
from cospec.cli import bench_shape as shape
from cospec.cli import options
from cospec.cli.options import present
from cospec.errors import InvalidInput

if TYPE_CHECKING:
    from cospec.arrivals import Arrivals
    from cospec.bench.metrics import Selection
    from cospec.bench.timing import Prompt

app = typer.Typer(help="Measure latency, throughput and acceptance; compare systems.", no_args_is_help=True)
app.command()(shape.accept)
app.command()(shape.roofline)

SERVED = "Server"
ARRIVALS = "Arrivals"
RESULTS = Path("results")


@app.command()
def latency(
    dataset_path: bench.DatasetPath,
    model: options.Model = "zoo",
    speculative_config: options.SpeculativeConfig = None,
    batch_size: Annotated[list[int], typer.Option(min=1, help="Prompts at once; may be repeated.")] = [1],  # noqa: B006
    num_iters: Annotated[int, typer.Option(min=1, help="Counted batches of each size.")] = 5,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before them.")] = 1,
    output_len: bench.OutputLen = 128,
    ignore_eos: bench.IgnoreEos = True,
    temperature: bench.Temperature = 0.0,
    seed: bench.Seed = 0,
    tokenizer: bench.Tokenizer = None,
    percentile_metrics: bench.PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: bench.MetricPercentiles = "50,99",
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    device: options.Device = None,
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    save_result: bench.SaveResult = False,
    result_dir: bench.ResultDir = RESULTS,
    result_filename: bench.ResultFilename = None,
) -> None:
    """Time one engine in this process at fixed batch sizes, without server and arrivals."""
    _require()
    from cospec.bench.latency import Batches, Bench
    from cospec.bench.local import EngineSystem
    from cospec.bench.timing import Params
    from cospec.bench.tokens import TokenCounter

    selection = _selection(percentile_metrics, metric_percentiles, [])
    engine = present(
        model=model,
        speculative_config=speculative_config,
        dtype=dtype,
        quantization=quantization,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=max(64, *batch_size),
    )
    system = EngineSystem.build("cospec", engine)
    sizes = [Batches(size, num_iters, num_iters_warmup) for size in batch_size]
    prompts = _prompts(dataset_path, max(size.prompts for size in sizes), seed)
    params = Params(max_tokens=output_len, temperature=temperature, seed=seed, ignore_eos=ignore_eos)
    system.start()
    counter = TokenCounter(output.load_tokenizer(tokenizer) if tokenizer else system.engine.tokenizer)
    with output.Bar(sum(num_iters + num_iters_warmup for _ in sizes)) as bar:
        runner = Bench(system, params, counter, bar.advance)
        runs = [runner.run(size, prompts, selection) for size in sizes]
    settings = {"engine": engine, "output_len": output_len, "temperature": temperature, "token_count": counter.method}
    output.finish("latency", settings, {"runs": runs}, output.place(save_result, result_dir, result_filename))


@app.command()
def serve(
    dataset_path: bench.DatasetPath,
    base_url: Annotated[
        str, typer.Option("--base-url", "--url", help="Of the server.", rich_help_panel=SERVED)
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="As the server names it; its only one by itself.", rich_help_panel=SERVED)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use chat completions.", rich_help_panel=SERVED)] = False,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", rich_help_panel=SERVED)] = None,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Keys laid over every request.", rich_help_panel=SERVED)
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds of silence that fail a request.", rich_help_panel=SERVED)
    ] = 600.0,
    num_prompts: bench.NumPrompts = 100,
    output_len: bench.OutputLen = 128,
    ignore_eos: bench.IgnoreEos = True,
    temperature: bench.Temperature = 0.0,
    seed: bench.Seed = 0,
    request_rate: Annotated[
        str, typer.Option(help="Requests/s; several by commas for a sweep; inf is at once.", rich_help_panel=ARRIVALS)
    ] = "inf",
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma gaps; 1 is Poisson, less is burstier.", rich_help_panel=ARRIVALS)
    ] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="File of arrival times in seconds, in their place.", rich_help_panel=ARRIVALS)
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once; a closed loop at rate inf.", rich_help_panel=ARRIVALS)
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before.", rich_help_panel=ARRIVALS)] = 1,
    tokenizer: bench.Tokenizer = None,
    goodput: bench.Goodput = [],  # noqa: B006
    percentile_metrics: bench.PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: bench.MetricPercentiles = "50,99",
    save_result: bench.SaveResult = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Every request's own figures too.", rich_help_panel=bench.RESULTS)
    ] = False,
    result_dir: bench.ResultDir = RESULTS,
    result_filename: bench.ResultFilename = None,
    more: Annotated[list[str], typer.Argument(metavar="", hidden=True)] = [],  # noqa: B006
) -> None:
    """Load any OpenAI-compatible server: ours, vLLM's, llama.cpp's, TGI. Bounds may follow --goodput in a row."""
    _require()
    from cospec.bench import serve as load
    from cospec.bench.client import Endpoint
    from cospec.bench.timing import Params
    from cospec.bench.tokens import TokenCounter
    from cospec.config import read_json

    if more and not goodput:
        raise InvalidInput("argument", more[0], "an option; the bounds of --goodput are the only words without one")
    selection = _selection(percentile_metrics, metric_percentiles, [*goodput, *more])
    extra = read_json(extra_body, "extra_body") if extra_body else {}
    endpoint = Endpoint(base_url, model, chat, api_key, extra, timeout)
    sweep = _arrivals(request_rate, burstiness, trace)
    prompts = _prompts(dataset_path, num_prompts * len(sweep), seed)
    parts = [tuple(prompts[start : start + num_prompts]) for start in range(0, len(prompts), num_prompts)]
    stages = tuple(load.Stage(arrivals, part, max_concurrency) for arrivals, part in zip(sweep, parts, strict=True))
    params = Params(max_tokens=output_len, temperature=temperature, seed=seed, ignore_eos=ignore_eos)
    workload = load.Workload(stages, params, num_warmups, seed)
    with output.Bar(len(prompts)) as bar:
        watch = load.Watch(bar.describe, lambda timing: bar.advance(failed=not timing.ok))
        endpoint, recordings = asyncio.run(load.record(endpoint, workload, watch))
    counter = TokenCounter(output.tokenizer_of(tokenizer, endpoint.model))
    runs = [
        load.report(recording, stage, counter, selection, save_detailed)
        for recording, stage in zip(recordings, stages, strict=False)
    ]
    settings = {
        "base_url": base_url,
        "model": endpoint.model,
        "max_concurrency": max_concurrency,
        "num_prompts": num_prompts,
        "output_len": output_len,
        "temperature": temperature,
        "goodput_ms": dict(selection.goodput),
        "seed": seed,
        "token_count": counter.method,
    }
    output.finish("serve", settings, {"runs": runs}, output.place(save_result, result_dir, result_filename))
    if any(run["interrupted"] or run["failed"] for run in runs):
        raise typer.Exit(1)


@app.command()
def compare(
    systems: Annotated[
        list[str],
        typer.Argument(help="NAME=WHAT, the baseline first; WHAT is a URL, a JSON object, a file of one, or a kind."),
    ],
    dataset_path: bench.DatasetPath,
    model: options.Model = "zoo",
    num_prompts: bench.NumPrompts = 12,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 1,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of every batch.")] = 3,
    num_warmups: Annotated[int, typer.Option(min=0, help="Batches of each system before the first turn.")] = 1,
    output_len: bench.OutputLen = 128,
    ignore_eos: bench.IgnoreEos = True,
    temperature: bench.Temperature = 0.0,
    seed: bench.Seed = 0,
    tokenizer: bench.Tokenizer = None,
    percentile_metrics: bench.PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: bench.MetricPercentiles = "50,99",
    save_result: bench.SaveResult = False,
    result_dir: bench.ResultDir = RESULTS,
    result_filename: bench.ResultFilename = None,
) -> None:
    """Alternate systems over the same prompts in one run, and give paired ratios with their intervals."""
    _require()
    from cospec.bench import compare as comparing
    from cospec.bench.systems import SystemSpec, as_json
    from cospec.bench.timing import Params
    from cospec.bench.tokens import TokenCounter

    selection = _selection(percentile_metrics, metric_percentiles, [])
    specs = [SystemSpec.parse(text, model) for text in systems]
    names = [spec.name for spec in specs]
    if len(names) < 2 or len(set(names)) < len(names):
        raise InvalidInput("systems", ", ".join(names), "two or more, each by a name of its own")
    built = [spec.build() for spec in specs]
    counter = TokenCounter(output.load_tokenizer(tokenizer or model))
    params = Params(max_tokens=output_len, temperature=temperature, seed=seed, ignore_eos=ignore_eos)
    schedule = comparing.Schedule(batch_size, repetitions, num_warmups, seed)
    prompts = _prompts(dataset_path, num_prompts, seed)
    pieces = len(schedule.pieces(prompts))
    with output.Bar(len(built) * (num_warmups + pieces * repetitions)) as bar:

        def ran(name: str) -> None:
            bar.describe(name)
            bar.advance()

        measured = comparing.compare(built, prompts, params, schedule, counter, ran)
    settings = {
        "systems": {spec.name: as_json(spec) for spec in specs},
        "batch_size": batch_size,
        "num_prompts": num_prompts,
        "repetitions": repetitions,
        "output_len": output_len,
        "temperature": temperature,
        "seed": seed,
        "token_count": counter.method,
    }
    found = comparing.report(measured, selection, seed)
    output.finish("compare", settings, found, output.place(save_result, result_dir, result_filename))


def _require() -> None:
    from cospec.bench.extra import require

    require()


def _selection(metrics: str, percentiles: str, goodput: list[str]) -> Selection:
    from cospec.bench import metrics as measured

    return measured.Selection(
        measured.parse_metrics(metrics), measured.parse_percentiles(percentiles), measured.parse_goodput(goodput)
    )


def _prompts(paths: list[Path], n: int, seed: int) -> list[Prompt]:
    from cospec.bench import datasets

    return datasets.sample(datasets.load_all(paths), n, seed)


def _arrivals(rates: str, burstiness: float, trace: Path | None) -> list[Arrivals]:
    from cospec.arrivals import Trace, by_rate

    if trace is not None:
        return [Trace.read(trace)]
    found: list[Arrivals] = []
    for text in rates.replace(",", " ").split():
        try:
            rate = float(text)
        except ValueError:
            raise InvalidInput("request_rate", text, "a number above 0, or several, or inf") from None
        found.append(by_rate(rate, burstiness))
    if not found:
        raise InvalidInput("request_rate", rates, "a number above 0, or several, or inf")
    return found
