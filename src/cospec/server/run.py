"""The server's process: binds the port, starts the engine, serves, and drains when it is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import uvicorn
from fastapi import FastAPI
from pydantic import Field

from cospec.config import EngineConfig
from cospec.engine.process import Build, build_engine
from cospec.engine.serving import EngineClient
from cospec.engine.supervisor import MAX_RESTARTS, TIMEOUT, Supervision
from cospec.engine.tokens import Tokens, import_tokenizers, load_tokenizer
from cospec.errors import InvalidInput, words
from cospec.lasting import keep
from cospec.options import Options
from cospec.server.app import create_app
from cospec.server.metrics import ServerMetrics
from cospec.server.service import Service

FLUSH_SECONDS = 5  # for answers on their way when the drain is over
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ServerSettings(Options):
    """What the server itself is told.

    Attributes:
        port: 0 takes a free one.
        api_key: asked of every request that reaches the model; None for open access.
        max_concurrent_requests: outputs that may be written or wait at once; calls beyond it get 429; None for any.
        drain_timeout: seconds that running requests get after SIGTERM; a second signal ends them at once.
        engine_timeout: seconds without progress after which ``/health`` calls the engine frozen; see ``Supervision``.
        max_engine_restarts: restarts in a row before the server ends; 0 ends the server with its engine.
        log_level: uvicorn's.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: str | None = Field(default=None, min_length=1)
    max_concurrent_requests: int | None = Field(default=None, ge=1)
    drain_timeout: float = Field(default=30.0, ge=0)
    engine_timeout: float = Field(default=TIMEOUT, ge=2, le=86400)
    max_engine_restarts: int = Field(default=MAX_RESTARTS, ge=0)
    log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "warning"


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
    with _bind(settings.host, settings.port) as listener:
        asyncio.run(_serve(config, settings, listener, _Faces(announce, build)))


@dataclass(frozen=True, slots=True)
class _Faces:
    announce: Callable[[str], None]
    build: Build


async def _serve(config: EngineConfig, settings: ServerSettings, listener: socket.socket, faces: _Faces) -> None:
    client = EngineClient(faces.build, Supervision(settings.engine_timeout, settings.max_engine_restarts))
    loading = asyncio.create_task(load_app(client, config, settings.api_key, settings.max_concurrent_requests))
    loop = asyncio.get_running_loop()
    for name in SIGNALS:
        loop.add_signal_handler(name, loading.cancel)
    try:
        await asyncio.wait({loading})
        if loading.cancelled():
            return
        host, port = listener.getsockname()[:2]
        announce = lambda: faces.announce(f"http://{host}:{port}")  # noqa: E731
        options = uvicorn.Config(
            loading.result(),
            log_level=settings.log_level,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            lifespan="off",
        )
        server = _Server(options, announce)
        shutdown = _Shutdown(client, server, settings.drain_timeout)
        for name in SIGNALS:
            loop.add_signal_handler(name, shutdown.begin)
        ending = asyncio.create_task(_end_with_engine(client, server))
        keep()
        await server.serve(sockets=[listener])
        ending.cancel()
        client.check_ended()
    finally:
        await client.close()


async def _end_with_engine(client: EngineClient, server: uvicorn.Server) -> None:
    """A server without its engine can do nothing: it ends, and whoever watches it starts another one."""
    await client.ended()
    server.should_exit = True


async def load_app(
    client: EngineClient, config: EngineConfig, api_key: str | None = None, limit: int | None = None
) -> FastAPI:
    """Start the engine of ``client`` and put the application in front of it.

    Raises:
        ModelError: the engine could not be built.
    """
    # The tokenizer's library takes seconds to import: time in which the engine's process loads its model.
    info, _ = await asyncio.gather(client.start(config), asyncio.to_thread(import_tokenizers))
    tokenizer = await asyncio.to_thread(load_tokenizer, info.tokenizer_path)
    tokens = Tokens(tokenizer, info.max_model_len, info.vocab_size)
    return create_app(Service(client, tokens, ServerMetrics(info.model_name), limit), api_key)


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
        self._on_started()


class _Shutdown:
    """The first signal drains, a second one ends what still runs."""

    def __init__(self, client: EngineClient, server: uvicorn.Server, timeout: float) -> None:
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


def _bind(host: str, port: int) -> socket.socket:
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
