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
    model: Annotated[
        str | None, typer.Argument(help="zoo, zoo:NAME, a folder, or a hub name.", show_default="zoo")
    ] = None,
    models: options.Models = None,
    ensemble: options.OutputDistribution = None,
    collaboration: options.Collaboration = None,
    speculative_config: options.SpeculativeConfig = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A key that clients may carry; repeat for several. Read from {KEY_VARIABLE}, too.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of such keys, one a line; a list of processes does not show them.", rich_help_panel=ACCESS
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that the header Host may have; repeat for several.",
            rich_help_panel=ACCESS,
            show_default="any",
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="A web page's origin that may read answers; repeat for several.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Of one request.", rich_help_panel=BOUNDS)] = None,
    max_prompts: Annotated[int | None, typer.Option(help="Prompts of one call.", rich_help_panel=BOUNDS)] = None,
    max_outputs: Annotated[
        int | None, typer.Option(help="Prompts times n of one call.", rich_help_panel=BOUNDS)
    ] = None,
    max_stop_sequences: Annotated[
        int | None, typer.Option(help="Stop strings of one request.", rich_help_panel=BOUNDS)
    ] = None,
    max_logprobs: Annotated[int | None, typer.Option(help="Alternatives per token.", rich_help_panel=BOUNDS)] = None,
    max_priority: Annotated[
        int | None,
        typer.Option(help="Requests choose a priority from -N to N; 0 leaves no choice.", rich_help_panel=BOUNDS),
    ] = None,
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(
            help="Outputs that run or wait at once; beyond them calls get 429.",
            rich_help_panel=QUEUE,
            show_default="four times --max-num-seqs",
        ),
    ] = None,
    max_key_share: Annotated[
        float | None,
        typer.Option(
            help="Part of them that one key may hold.", rich_help_panel=QUEUE, show_default="0.5, or 1 with one key"
        ),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Calls that one key may begin.", rich_help_panel=QUEUE, show_default="any number")
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds until a call ends with an error.", rich_help_panel=QUEUE),
    ] = None,
    max_connections: Annotated[int | None, typer.Option(help="Open at once.", rich_help_panel=CONNECTIONS)] = None,
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
        typer.Option(help="Seconds for a client to read what was sent.", rich_help_panel=CONNECTIONS),
    ] = None,
    strict: Annotated[
        bool | None, typer.Option("--strict", help="Refuse unknown keys of requests; by default a header names them.")
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests get after SIGTERM.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="Of the web server.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name that clients ask for.", show_default="the model")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Another tokenizer than the model's.", show_default="the model's")
    ] = None,
    engine_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds without progress after which the engine counts as frozen.", rich_help_panel=ENGINE),
    ] = None,
    max_engine_restarts: Annotated[
        int | None,
        typer.Option(
            help="Restarts of a dead engine in a row; 0 ends the server with its engine.", rich_help_panel=ENGINE
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON or YAML file with any of these options; the command line wins.")
    ] = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    threads: options.Threads = None,
    instruction_set: options.InstructionSet = None,
    native: options.Native = None,
    plugins: options.Plugins = None,
    enable_prefix_caching: options.PrefixCaching = None,
) -> None:
    """Serve a model over HTTP, as OpenAI does."""
    # Every option has the name of the field that the option sets, but for these.
    given = {name: value for name, value in context.params.items() if name not in (*MODEL_KEYS, "config")}
    given |= {"api_key": api_key or _key_of_environment()}
    given = options.chosen_models([*([model] if model else []), *(models or [])]) | {
        name: value for name, value in given.items() if value not in (None, [], ())
    }
    read = _from_file(config)
    if given.keys() & MODEL_KEYS:  # one model and several are different keys
        read = {key: value for key, value in read.items() if key not in MODEL_KEYS}
    start({**read, **given})


def _key_of_environment() -> list[str] | None:
    """An empty variable is a key that is empty, and is refused; typer would take the variable for absent."""
    found = os.environ.get(KEY_VARIABLE)
    return None if found is None else [found]


def _from_file(path: Path | None) -> dict[str, Any]:
    """Options from a file; names may be written as on the command line, with hyphens."""
    if path is None:
        return {}
    from cospec.config import read_file

    return {str(key).replace("-", "_"): value for key, value in read_file(path).items()}


def start(given: dict[str, Any]) -> None:
    """Serve with plain options until told to stop.

    Raises:
        CospecError: an option is wrong, the port is taken, or the model cannot be loaded.
    """
    from cospec.config import EngineConfig
    from cospec.options import parse

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

    # The engine's process reports what comes between these two lines, see ``engine.summary``.
    say(f"cospec {cospec.__version__} starts and loads {name}")
    run(config, settings, lambda url: say(f"cospec serves {name} at {url}"))
