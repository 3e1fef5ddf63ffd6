"""``cospec bench serve``: measures any OpenAI-compatible server under load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cospec.cli import bench_common as output
from cospec.cli import bench_options as bench
from cospec.cli.bench_options import grouped
from cospec.errors import InvalidInput

if TYPE_CHECKING:
    from cospec.bench.http_client import Endpoint
    from cospec.bench.request_record import Prompt
    from cospec.bench.serve import RateRun
    from cospec.simulation.arrivals import Arrivals

SERVED = "Server"
ARRIVALS = "Arrivals"
RATES = "a number above 0, or several, or inf"


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """The server under test."""

    base_url: Annotated[str, typer.Option("--base-url", "--url", help="URL of the server.", rich_help_panel=SERVED)] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[
        str | None,
        typer.Option(help="Model on the server.", rich_help_panel=SERVED, show_default="the server's only model"),
    ] = None
    chat: Annotated[bool, typer.Option("--chat", help="Use chat completions.", rich_help_panel=SERVED)] = False
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", rich_help_panel=SERVED)] = None
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Keys added to every request.", rich_help_panel=SERVED)
    ] = None
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds without data until a request fails.", rich_help_panel=SERVED)
    ] = 600.0

    def endpoint(self) -> Endpoint:
        """Build the endpoint; no request is sent."""
        from cospec.bench.http_client import Endpoint
        from cospec.config import read_json

        extra: Mapping[str, Any] = read_json(self.extra_body, "extra_body") if self.extra_body else {}
        return Endpoint(self.base_url, self.model, self.chat, self.api_key, extra, self.timeout)


@dataclass(frozen=True, slots=True)
class RateFlags:
    """When requests arrive, and how many run together."""

    request_rate: Annotated[
        str,
        typer.Option(help="Requests/s; a list is a sweep; inf sends all at once.", rich_help_panel=ARRIVALS),
    ] = "inf"
    burstiness: Annotated[
        float,
        typer.Option(help="Shape of the gamma gaps; 1 is Poisson, less is burstier.", rich_help_panel=ARRIVALS),
    ] = 1.0
    trace: Annotated[
        Path | None, typer.Option(help="File of arrival times in seconds, instead of rates.", rich_help_panel=ARRIVALS)
    ] = None
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Most open requests; a closed loop at rate inf.", rich_help_panel=ARRIVALS),
    ] = None
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Uncounted requests before the runs.", rich_help_panel=ARRIVALS)
    ] = 1

    def sweep(self) -> list[Arrivals]:
        """Return one arrival process per run.

        Raises:
            InvalidInput: a rate or a trace is invalid.
        """
        from cospec.simulation.arrivals import Trace, by_rate

        if self.trace is not None:
            return [Trace.read(self.trace)]
        found: list[Arrivals] = []
        for text in self.request_rate.replace(",", " ").split():
            try:
                rate = float(text)
            except ValueError:
                raise InvalidInput("request_rate", text, RATES) from None
            found.append(by_rate(rate, self.burstiness))
        if not found:
            raise InvalidInput("request_rate", self.request_rate, RATES)
        return found

    def stages(self, sweep: list[Arrivals], prompts: list[Prompt]) -> tuple[RateRun, ...]:
        """Return the runs, each with prompts of its own."""
        from cospec.bench.serve import RateRun

        n = len(prompts) // len(sweep)
        parts = [tuple(prompts[start : start + n]) for start in range(0, len(prompts), n)]
        return tuple(RateRun(arrivals, part, self.max_concurrency) for arrivals, part in zip(sweep, parts, strict=True))


@grouped
def serve(
    prompts: bench.PromptFlags,
    server: ServerFlags,
    pace: RateFlags,
    decoding: bench.DecodingFlags,
    metrics: bench.MetricFlags,
    results: bench.ResultFlags,
    num_prompts: bench.NumPrompts = 100,
    goodput: Annotated[
        list[str],
        typer.Option(
            metavar="METRIC:MS",
            help="Bounds of a good request by ttft, tpot or e2el: ttft:200.",
            rich_help_panel=bench.METRICS,
        ),
    ] = [],  # noqa: B006
    save_detailed: Annotated[
        bool,
        typer.Option("--save-detailed", help="Save figures of every request.", rich_help_panel=bench.RESULTS),
    ] = False,
    more: Annotated[list[str], typer.Argument(metavar="METRIC:MS", hidden=True)] = [],  # noqa: B006
) -> None:
    """Measure any OpenAI-compatible server under load.

    Examples are cospec, vLLM, llama.cpp and TGI. --goodput takes several bounds.
    """
    output.require()
    from cospec.bench import serve as load
    from cospec.bench.token_counter import TokenCounter

    if more and not goodput:
        raise InvalidInput("argument", more[0], "an option; only the bounds of --goodput need no option")
    to, selection = results.place(), metrics.selection([*goodput, *more])
    endpoint, sweep = server.endpoint(), pace.sweep()
    texts = prompts.take(num_prompts * len(sweep))
    stages = pace.stages(sweep, texts)
    named = output.load_tokenizer(metrics.tokenizer) if metrics.tokenizer else None
    workload = load.Workload(stages, decoding.params(prompts.seed), pace.num_warmups, prompts.seed)
    with output.ProgressBar(len(texts)) as bar:
        watch = load.ServeObserver(bar.describe, lambda timing: bar.advance(failed=not timing.ok))
        endpoint, recordings = asyncio.run(load.record(endpoint, workload, watch))
    counter = TokenCounter(named if metrics.tokenizer else output.tokenizer_of(endpoint.model))
    runs = [
        load.report(recording, stage, counter, selection, save_detailed)
        for recording, stage in zip(recordings, stages, strict=False)
    ]
    settings = {
        "base_url": server.base_url,
        "model": endpoint.model,
        "max_concurrency": pace.max_concurrency,
        "num_prompts": num_prompts,
        "output_len": decoding.output_len,
        "temperature": decoding.temperature,
        "goodput_ms": dict(selection.goodput),
        "seed": prompts.seed,
        "token_count": counter.method,
    }
    output.finish("serve", settings, {"runs": runs}, to)
    if any(run["interrupted"] or run["failed"] for run in runs):
        raise typer.Exit(1)
