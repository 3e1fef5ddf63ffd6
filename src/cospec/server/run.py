"""The server's process: binds the port, starts the engine, serves, and drains on a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from cospec.config import EngineConfig
from cospec.errors import InvalidInput, words
from cospec.models.hf_tokenizer import import_libraries, tokenizer_of
from cospec.process_utils import freeze_gc
from cospec.runtime.async_engine import AsyncEngineClient
from cospec.runtime.engine_client import EngineClient
from cospec.runtime.engine_process_main import Build, build_engine
from cospec.runtime.engine_supervision import Supervision
from cospec.server.admission import AdmissionLimits
from cospec.server.app import create_app
from cospec.server.auth import read_keys
from cospec.server.connections import TimedConfig, limit_accept_errors
from cospec.server.machine_costs import watch
from cospec.server.metrics import ServerMetrics
from cospec.server.service import Service
from cospec.server.settings import ServerSettings
from cospec.text.tokenizer import TextTokenizer

FLUSH_SECONDS = 5  # to send pending answers after the drain
BACKLOG = 2048  # connections that wait to be accepted
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(
    config: EngineConfig,
    settings: ServerSettings,
    announce: Callable[[str], None] = print,
    build: Build = build_engine,
) -> None:
    """Serve until SIGTERM or SIGINT; return after the drain.

    Args:
        announce: called with the server's URL when the server is ready.

    Raises:
        CospecError: the port is in use, the engine cannot be built, or its processes died repeatedly.
    """
    # Bind the port first: a port in use should fail before the model loads. The server accepts connections only when
    # the engine is ready.
    settings = read_keys(settings)
    with bind(settings.host, settings.port) as listener:
        asyncio.run(_serve(config, settings, listener, _Startup(announce, build)))


@dataclass(frozen=True, slots=True)
class _Startup:
    announce: Callable[[str], None]
    build: Build


async def _serve(config: EngineConfig, settings: ServerSettings, listener: socket.socket, startup: _Startup) -> None:
    supervision = Supervision(settings.engine_timeout, settings.max_engine_restarts)
    client = AsyncEngineClient(startup.build, supervision, settings.engine_log_level)
    loading = asyncio.create_task(load_app(client, config, settings))
    loop = asyncio.get_running_loop()
    for name in SIGNALS:
        loop.add_signal_handler(name, loading.cancel)
    try:
        await asyncio.wait({loading})
        if loading.cancelled():
            return
        host, port = listener.getsockname()[:2]
        announce = lambda: startup.announce(f"http://{host}:{port}")  # noqa: E731
        options = TimedConfig(loading.result(), settings, FLUSH_SECONDS)
        limit_accept_errors(loop)
        server = _Server(options, announce)
        shutdown = _Shutdown(client, server, settings.drain_timeout)
        for name in SIGNALS:
            loop.add_signal_handler(name, shutdown.begin)
        ending = asyncio.create_task(_end_with_engine(client, server))
        freeze_gc()
        await server.serve(sockets=[listener])
        ending.cancel()
        client.check_ended()
    finally:
        await client.close()


async def _end_with_engine(client: AsyncEngineClient, server: uvicorn.Server) -> None:
    """End the server after its engine. A supervisor of the process can then restart the server."""
    await client.ended()
    server.should_exit = True


async def load_app(
    client: AsyncEngineClient, config: EngineConfig, settings: ServerSettings = ServerSettings()
) -> FastAPI:
    """Start the engine of ``client`` and build the application on top.

    Raises:
        ModelError: the engine could not be built.
    """
    # The import of the tokenizer's library takes seconds, so the import overlaps the engine's loading.
    await asyncio.gather(client.start(config), asyncio.to_thread(import_libraries))
    return await make_app(client, settings, AdmissionLimits.of(settings, config.max_num_seqs))


async def make_app(client: EngineClient, settings: ServerSettings, limits: AdmissionLimits) -> FastAPI:
    """Build the application of an engine that is ready."""
    info = client.info
    tokenizer = await asyncio.to_thread(tokenizer_of, info.tokenizer_path)
    tokens = TextTokenizer(tokenizer, info.max_model_len, info.vocab_size)
    await asyncio.to_thread(tokens.prepare)
    metrics = ServerMetrics(info.model_name)
    app = create_app(Service(client, tokens, metrics, settings, limits))
    app.state.price_watch = asyncio.create_task(watch(client, metrics.machine_costs))  # the loop keeps no task
    return app


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which would close the port before the drain."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:  # the system's queue may hold more connections than the loop accepts at once
            listener.listen(BACKLOG)
        self._on_started()


class _Shutdown:
    """The first signal drains; the second signal aborts all requests."""

    def __init__(self, client: AsyncEngineClient, server: uvicorn.Server, timeout: float) -> None:
        self._client = client
        self._server = server
        self._timeout = timeout
        self._drain: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._run())
        else:
            self._client.abort_all()

    async def _run(self) -> None:
        await self._client.drain(self._timeout)
        self._server.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket for the server; port 0 takes a free port.

    Raises:
        InvalidInput: the address is in use or does not exist.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only if the protocol is named. With Nagle's algorithm the second part of an
    # answer waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(
            "host and port", words(f"{host}:{port} ({reason})"), "a free address of this machine"
        ) from None
    return listener
