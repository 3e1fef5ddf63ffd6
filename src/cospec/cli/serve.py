"""``cospec serve``: the OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cospec.cli import options
from cospec.cli.options import present

SERVER_KEYS = ("host", "port", "api_key", "max_concurrent_requests", "drain_timeout", "log_level")
SUPERVISION_KEYS = ("engine_timeout", "max_engine_restarts")
MODEL_KEYS = {"model", "models"}


def serve(
    model: Annotated[str | None, typer.Argument(help="zoo (the default), zoo:NAME, a folder, or a hub name.")] = None,
    models: options.Models = None,
    law: options.Law = None,
    collaboration: options.Collaboration = None,
    speculative_config: options.SpeculativeConfig = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless given.")] = None,
    port: Annotated[int | None, typer.Option(help="8000 unless given; 0 takes a free one.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="COSPEC_API_KEY", help="Asked of every client.")] = None,
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(help="Outputs at once, waiting ones included; beyond it calls get 429."),
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests get after SIGTERM; 30 unless given.")
    ] = None,
    engine_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds without progress after which /health calls the engine frozen; 120 unless given."),
    ] = None,
    max_engine_restarts: Annotated[
        int | None, typer.Option(help="Restarts of a dead engine in a row; 3 unless given, 0 for none.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="Of the web server; warning unless given.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name that clients ask for.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Another tokenizer than the model's.")] = None,
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
    plugins: options.Plugins = None,
    enable_prefix_caching: options.PrefixCaching = None,
) -> None:
    """Serve a model over HTTP, as OpenAI does."""
    given = present(
        **options.chosen_models([*([model] if model else []), *(models or [])]),
        law=law,
        collaboration=collaboration,
        speculative_config=speculative_config,
        host=host,
        port=port,
        api_key=api_key,
        max_concurrent_requests=max_concurrent_requests,
        drain_timeout=drain_timeout,
        engine_timeout=engine_timeout,
        max_engine_restarts=max_engine_restarts,
        log_level=log_level,
        served_model_name=served_model_name,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        device=device,
        dtype=dtype,
        quantization=quantization,
        threads=threads,
        plugins=plugins or None,
        enable_prefix_caching=enable_prefix_caching,
    )
    read = _from_file(config)
    if given.keys() & MODEL_KEYS:  # one model and several are different keys
        read = {key: value for key, value in read.items() if key not in MODEL_KEYS}
    start({**read, **given})


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

    settings_given = {key: given.pop(key) for key in (*SERVER_KEYS, *SUPERVISION_KEYS) if key in given}
    config = EngineConfig.build(given)

    from rich.console import Console

    from cospec.server.run import ServerSettings, run

    name = config.served_model_name or config.model
    settings = parse(ServerSettings, settings_given)
    with Console(stderr=True).status(f"loading {name}") as status:  # shown in terminals only

        def announce(url: str) -> None:
            status.stop()
            print(f"cospec serves {name} at {url}", file=sys.stderr, flush=True)

        run(config, settings, announce)
