"""``cospec serve``: the OpenAI-compatible server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cospec.cli import options

SERVER_KEYS = (
    "host", "port", "api_key", "api_key_file", "allowed_hosts", "allowed_origins", "max_body_bytes", "max_prompts",
    "max_outputs", "max_stop_sequences", "max_logprobs", "max_priority", "max_concurrent_requests", "max_key_share",
    "requests_per_minute", "request_timeout", "max_connections", "header_timeout", "body_timeout",
    "keep_alive_timeout", "write_timeout", "strict", "drain_timeout", "engine_timeout",
    "max_engine_restarts", "log_level",
)  # fmt: skip
KEY_VARIABLE = "COSPEC_API_KEY"
ACCESS = "Access"
BOUNDS = "Bounds of requests"
QUEUE = "Queue"
ENGINE = "Engine process"
CONNECTIONS = "Connections"
MODEL_KEYS = {"model", "models"}


def serve(
    context: typer.Context,
    model: options.ModelArgument = None,
    models: options.Models = None,
    ensemble: options.OutputDistribution = None,
    collaboration: options.Collaboration = None,
    speculative_config: options.SpeculativeConfig = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="An API key; repeat for several.",
            rich_help_panel=ACCESS,
            show_default=f"api_key in --config, otherwise {KEY_VARIABLE}",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, one per line; process lists do not show the keys.", rich_help_panel=ACCESS
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="An allowed value of the header Host; repeat for several.",
            rich_help_panel=ACCESS,
            show_default="any",
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="An allowed CORS origin; repeat for several.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Bytes of one request.", rich_help_panel=BOUNDS)] = None,
    max_prompts: Annotated[int | None, typer.Option(help="Prompts per call.", rich_help_panel=BOUNDS)] = None,
    max_outputs: Annotated[int | None, typer.Option(help="Prompts times n per call.", rich_help_panel=BOUNDS)] = None,
    max_stop_sequences: Annotated[
        int | None, typer.Option(help="Stop strings per request.", rich_help_panel=BOUNDS)
    ] = None,
    max_logprobs: Annotated[int | None, typer.Option(help="Alternatives per token.", rich_help_panel=BOUNDS)] = None,
    max_priority: Annotated[
        int | None,
        typer.Option(help="Requests may set a priority from -N to N; 0 forbids priorities.", rich_help_panel=BOUNDS),
    ] = None,
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(
            help="Outputs that run or wait; further calls get status 429.",
            rich_help_panel=QUEUE,
            show_default="four times --max-num-seqs, at least --max-outputs",
        ),
    ] = None,
    max_key_share: Annotated[
        float | None,
        typer.Option(
            help="Share of these outputs per key.",
            rich_help_panel=QUEUE,
            show_default="0.5, or 1 with one key",
        ),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Calls per minute of one key.", rich_help_panel=QUEUE, show_default="any number")
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds until a call ends with an error.", rich_help_panel=QUEUE),
    ] = None,
    max_connections: Annotated[int | None, typer.Option(help="Open connections.", rich_help_panel=CONNECTIONS)] = None,
    header_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for the head of a request.", rich_help_panel=CONNECTIONS),
    ] = None,
    body_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for the body of a request.", rich_help_panel=CONNECTIONS),
    ] = None,
    keep_alive_timeout: Annotated[
        int | None, typer.Option(help="Seconds for the next request.", rich_help_panel=CONNECTIONS)
    ] = None,
    write_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for a client to read the data sent.", rich_help_panel=CONNECTIONS),
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict", help="Refuse unknown keys of requests; by default a header names them."),
    ] = None,
    drain_timeout: Annotated[float | None, typer.Option(help="Seconds for running requests after SIGTERM.")] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Log level of the web server; debug also for the engine process.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients.", show_default="the model")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer to use.", show_default="the model's")] = None,
    engine_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds without progress until the engine counts as frozen.", rich_help_panel=ENGINE),
    ] = None,
    max_engine_restarts: Annotated[
        int | None,
        typer.Option(
            help="Consecutive restarts of a dead engine; 0 ends the server with the engine.", rich_help_panel=ENGINE
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON or YAML file with any of these options; the command line wins.")
    ] = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    weight_cache_bytes: options.WeightCacheBytes = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    threads: options.Threads = None,
    instruction_set: options.InstructionSet = None,
    native: options.Native = None,
    plugins: options.Plugins = None,
    enable_prefix_caching: options.PrefixCaching = None,
    pipeline_parallel_size: options.PipelineParallelSize = None,
    tensor_parallel_size: options.TensorParallelSize = None,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    # Every option has the name of its field, with these exceptions.
    given = {name: value for name, value in context.params.items() if name not in (*MODEL_KEYS, "config")}
    given = options.chosen_models(models or [], model) | {
        name: value for name, value in given.items() if value not in (None, [], ())
    }
    read = _from_file(config)
    if given.keys() & MODEL_KEYS:  # one model and several models are different keys
        read = {key: value for key, value in read.items() if key not in MODEL_KEYS}
    start({**_key_of_environment(), **read, **given})


def _key_of_environment() -> dict[str, list[str]]:
    """Return the option ``api_key`` of the environment variable, if there is one.

    An empty variable is an empty key, which is refused; typer would treat the variable as absent.
    """
    found = os.environ.get(KEY_VARIABLE)
    return {} if found is None else {"api_key": [found]}


def _from_file(path: Path | None) -> dict[str, Any]:
    """Read options from a file; names may have hyphens, as on the command line."""
    if path is None:
        return {}
    from cospec.config import read_file

    return {str(key).replace("-", "_"): value for key, value in read_file(path).items()}


def start(given: dict[str, Any]) -> None:
    """Serve with plain options until a signal ends the process.

    Raises:
        CospecError: an option is wrong, the port is in use, or the model cannot be loaded.
    """
    from cospec.config import EngineConfig
    from cospec.plugin_options import parse, unknown_key

    known = sorted([*SERVER_KEYS, *EngineConfig.model_fields])
    for key, value in given.items():
        if key not in known:
            raise unknown_key(key, value, known)
    settings_given = {key: given.pop(key) for key in SERVER_KEYS if key in given}
    config = EngineConfig.build(given)

    import cospec
    from cospec.server.auth import read_keys
    from cospec.server.run import run
    from cospec.server.settings import ServerSettings

    name = config.served_model_name or config.model
    settings = read_keys(parse(ServerSettings, settings_given))

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    # The engine's process prints its report between these two lines, see ``metrics.start_report``.
    say(f"cospec {cospec.__version__} starts and loads {name}")
    run(config, settings, lambda url: say(f"cospec serves {name} at {url}"))
