"""The server's process: binds the port, starts the engine, serves, and drains when it is told to end."""

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
from cospec.process_utils import freeze_gc
from cospec.runtime.async_engine import AsyncEngineClient
from cospec.runtime.engine_core import Build, build_engine
from cospec.runtime.supervisor import Supervision
from cospec.server.admission import AdmissionLimits
from cospec.server.app import create_app
from cospec.server.auth import read_keys
from cospec.server.connections import TimedConfig, limit_accept_errors
from cospec.server.metrics import ServerMetrics
from cospec.server.service import Service
from cospec.server.settings import ServerSettings
from cospec.text.tokenizer import TextTokenizer, import_tokenizers, load_tokenizer

FLUSH_SECONDS = 5  # for answers on their way when the drain is over
BACKLOG = 2048  # connections that wait to be accepted
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(
    config: EngineConfig,
    settings: ServerSettings,
    announce: Callable[[str], None] = print,
    build: Build = build_engine,
) -> None:
    """Serve until SIGTERM or SIGINT; returns after the drain.

    Args:
        announce: called with the server's URL once it answers.

    Raises:
        CospecError: the port is taken, the engine cannot be built, or its processes died again and again.
    """
    # The port comes first: loading a model only to find it taken would waste the user's time. Nothing is accepted
    # before the engine is ready, so a server that answers is one that serves.
    settings = read_keys(settings)
    with bind(settings.host, settings.port) as listener:
        asyncio.run(_serve(config, settings, listener, _Faces(announce, build)))


@dataclass(frozen=True, slots=True)
class _Faces:
    announce: Callable[[str], None]
    build: Build


async def _serve(config: EngineConfig, settings: ServerSettings, listener: socket.socket, faces: _Faces) -> None:
    client = AsyncEngineClient(faces.build, Supervision(settings.engine_timeout, settings.max_engine_restarts))
    loading = asyncio.create_task(load_app(client, config, settings))
    loop = asyncio.get_running_loop()
    for name in SIGNALS:
        loop.add_signal_handler(name, loading.cancel)
    try:
        await asyncio.wait({loading})
        if loading.cancelled():
            return
        host, port = listener.getsockname()[:2]
        announce = lambda: faces.announce(f"http://{host}:{port}")  # noqa: E731
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
    """A server without its engine can do nothing: it ends, and whoever watches it starts another one."""
    await client.ended()
    server.should_exit = True


async def load_app(
    client: AsyncEngineClient, config: EngineConfig, settings: ServerSettings = ServerSettings()
) -> FastAPI:
    """Start the engine of ``client`` and put the application in front of it.

    Raises:
        ModelError: the engine could not be built.
    """
    # The tokenizer's library takes seconds to import: time in which the engine's process loads its model.
    info, _ = await asyncio.gather(client.start(config), asyncio.to_thread(import_tokenizers))
    tokenizer = await asyncio.to_thread(load_tokenizer, info.tokenizer_path)
    tokens = TextTokenizer(tokenizer, info.max_model_len, info.vocab_size)
    await asyncio.to_thread(tokens.prepare)
    limits = AdmissionLimits.of(settings, config.max_num_seqs)
    return create_app(Service(client, tokens, ServerMetrics(info.model_name), settings, limits))


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
        for listener in sockets or []:  # the queue of the system is longer than what the loop accepts at once
            listener.listen(BACKLOG)
        self._on_started()


class _Shutdown:
    """The first signal drains, a second one ends what still runs."""

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
    """A listening address for the server; port 0 takes a free port.

    Raises:
        InvalidInput: the address is in use or does not exist.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named. With it the second part of an answer, a body
    # or a stream's next event, waits 40 ms for the client to acknowledge the first.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(
            "host and port", words(f"{host}:{port} ({reason})"), "an address that is free here"
        ) from None
    return listener
