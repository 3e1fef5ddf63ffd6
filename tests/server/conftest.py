"""A server around the fake engine, on a free port, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import uvicorn

from cospec.config import EngineConfig
from cospec.runtime.async_engine import AsyncEngineClient
from cospec.server.connections import TimedConfig
from cospec.server.run import bind, load_app
from cospec.server.settings import ServerSettings
from server.fake_engine import FakeEngine, write_tokenizer

ResultT = TypeVar("ResultT")


@dataclass
class Running:
    """A server that answers, and the engine's client inside it. ``call`` runs a function in the server's loop."""

    url: str
    client: AsyncEngineClient
    loop: asyncio.AbstractEventLoop
    api_key: str | None = None
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self.http = httpx.Client(base_url=self.url, timeout=30, headers=headers)

    @property
    def openai(self) -> Any:
        """The official client; untyped, as the server answers with fields that the client's types do not have."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key or "none", max_retries=0)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, content=json.dumps(body))

    def run(self, make: Callable[[], ResultT]) -> ResultT:
        async def call() -> ResultT:
            return make()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)


class ServerThread:
    """Starts a server and stops it again."""

    def __init__(self, config: EngineConfig, settings: ServerSettings = ServerSettings()) -> None:
        self._config, self._settings = config, settings
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._running: Running | None = None
        self._server: uvicorn.Server | None = None

    def start(self) -> Running:
        self._thread.start()
        assert self._ready.wait(60)
        assert self._running is not None
        return self._running

    def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join()  # however long: a machine that stood still meanwhile is no error, and tests have a limit

    async def _main(self) -> None:
        client = AsyncEngineClient(FakeEngine.build)
        try:
            app = await load_app(client, self._config, self._settings)
            with bind("127.0.0.1", 0) as listener:
                self._server = uvicorn.Server(TimedConfig(app, self._settings, 5))
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                listener.listen()  # connections queue until uvicorn takes them, so no client has to wait for uvicorn
                keys = self._settings.api_key
                self._running = Running(url, client, asyncio.get_running_loop(), keys[0] if keys else None)
                self._ready.set()
                await self._server.serve(sockets=[listener])
        finally:
            await client.close()
            self._ready.set()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def config(tokenizer_folder: Path) -> EngineConfig:
    return EngineConfig(model="fake", tokenizer=str(tokenizer_folder))


@pytest.fixture(scope="session")
def server(config: EngineConfig) -> Iterator[Running]:
    """Shared by all tests that leave the server unchanged."""
    thread = ServerThread(config)
    yield thread.start()
    thread.stop()


@pytest.fixture
def own_server(config: EngineConfig) -> Iterator[Running]:
    """For tests that break or drain it; asks for a key."""
    thread = ServerThread(config, ServerSettings(api_key=("secret",)))
    yield thread.start()
    thread.stop()


@pytest.fixture
def server_of(config: EngineConfig) -> Iterator[Callable[..., Running]]:
    """Starts servers with settings of their own."""
    threads: list[ServerThread] = []

    def start(**settings: Any) -> Running:
        threads.append(ServerThread(config, ServerSettings(**settings)))
        return threads[-1].start()

    yield start
    for thread in threads:
        thread.stop()


@pytest.fixture(scope="module")
def strict_server(config: EngineConfig) -> Iterator[Running]:
    """Refuses unknown keys."""
    thread = ServerThread(config, ServerSettings(strict=True))
    yield thread.start()
    thread.stop()
