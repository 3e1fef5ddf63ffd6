"""The engine's process and the server's: starting, failing to start, stopping, draining on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cospec.config import EngineConfig
from cospec.core.types import Event, FinishReason, Request
from cospec.errors import CospecError, EngineStopped, InvalidInput, ModelError
from cospec.runtime.async_engine import AsyncEngineClient
from cospec.runtime.engine_client import RequestRefused
from cospec.runtime.engine_process_main import EngineCoreProc, ProgressCounter
from cospec.runtime.messages import Measure, Measured, Stop
from cospec.sampling_params import SamplingParams
from cospec.server.run import run
from cospec.server.settings import ServerSettings
from cospec.text.input_processor import make_requests
from harness.waiting import until
from server.fake_engine import FakeEngine

if TYPE_CHECKING:
    from server.conftest import Running

Start = Callable[..., tuple[subprocess.Popen[str], str]]
TESTS = Path(__file__).parents[1]
SERVE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from server.fake_engine import FakeEngine
from cospec.config import EngineConfig
from cospec.errors import EngineStopped
from cospec.server.run import run
from cospec.server.settings import ServerSettings
config = EngineConfig(model=sys.argv[3], tokenizer=sys.argv[1])
settings = ServerSettings(port=0, drain_timeout=float(sys.argv[2]), max_engine_restarts=0)
print("starting", flush=True)
try:
    run(config, settings, lambda url: print(url, flush=True), FakeEngine.build)
except EngineStopped:
    sys.exit(1)
"""


@pytest.fixture
def served(tokenizer_folder: Path) -> Iterator[Start]:
    """Starts servers of their own, each in a process group; yields a function of the drain's time limit."""
    started: list[subprocess.Popen[str]] = []

    def start(drain_timeout: float, model: str = "fake") -> tuple[subprocess.Popen[str], str]:
        arguments = [sys.executable, "-c", SERVE, str(tokenizer_folder), str(drain_timeout), model]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        return process, process.stdout.readline().strip() if model == "fake" else ""

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def begin(url: str, prompt: str) -> tuple[threading.Thread, list[httpx.Response]]:
    """A slow request under way in a thread."""
    answers: list[httpx.Response] = []
    body = {"prompt": prompt, "max_tokens": 150}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60)))
    thread.start()
    until(lambda: 'cospec:num_requests_running{model_name="fake"} 1.0' in httpx.get(f"{url}/metrics").text)
    return thread, answers


def test_sigterm_to_the_group_drains_and_exits_with_zero(served: Start) -> None:
    process, url = served(30)
    engine = children(process.pid)
    with httpx.Client(base_url=url) as idle:
        assert idle.get("/ready").status_code == 200
        thread, answers = begin(url, "SLOW")
        os.killpg(process.pid, signal.SIGTERM)
        until(lambda: idle.get("/ready").status_code == 503)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
        thread.join(60)
    assert answers[0].json()["usage"]["completion_tokens"] == 150
    assert process.wait(30) == 0
    until(lambda: not any(alive(pid) for pid in engine))


def test_drain_has_a_time_limit(served: Start) -> None:
    process, url = served(0.1)
    thread, answers = begin(url, "FOREVER")
    process.send_signal(signal.SIGTERM)
    thread.join(60)
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
    assert process.wait(30) == 0


def test_second_signal_ends_the_drain(served: Start) -> None:
    process, url = served(600)
    thread, answers = begin(url, "FOREVER")
    process.send_signal(signal.SIGINT)
    until(lambda: httpx.get(f"{url}/ready").status_code == 503)
    process.send_signal(signal.SIGINT)
    thread.join(60)
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
    assert process.wait(30) == 0


def test_sigterm_while_a_model_loads(served: Start) -> None:
    process, _ = served(600, "endless")
    until(lambda: len(children(process.pid)) > 0)
    engine = children(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    until(lambda: not any(alive(pid) for pid in engine))


def test_engine_ends_with_a_killed_server(served: Start) -> None:
    process, _ = served(1)
    engine = children(process.pid)
    assert engine
    process.kill()
    process.wait(10)
    until(lambda: not any(alive(pid) for pid in engine))


def test_server_without_restarts_ends_with_its_engine(served: Start) -> None:
    process, url = served(600)
    thread, answers = begin(url, "FOREVER")
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "DIE"}, timeout=60).status_code == 503
    thread.join(60)
    assert (answers[0].status_code, "exit code 3" in answers[0].text) == (503, True)
    assert process.wait(30) == 1


def test_taken_port_is_reported_before_a_model_is_loaded(server: Running) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(InvalidInput, match=f"127.0.0.1:{port}"):
        run(EngineConfig(model="missing"), ServerSettings(port=port), build=FakeEngine.build)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("missing", "model is 'missing'"),
        ("broken", "ZeroDivisionError: bad arithmetic"),
        ("fatal", "exit code 7"),
    ],
)
def test_engine_that_cannot_start_says_why(model: str, expected: str) -> None:
    with pytest.raises(ModelError) as error:
        run(EngineConfig(model=model), ServerSettings(port=0), build=FakeEngine.build)
    assert expected in str(error.value)


def test_serve_with_an_unknown_model_prints_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cospec", "serve", "/no/such/folder", "--port", "0"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == ""
    *steps, line = done.stderr.splitlines()
    assert line.startswith("cospec: model is '/no/such/folder'")
    assert all("starts and loads" in step or " INFO " in step for step in steps)


def with_client(config: EngineConfig, use: Callable[[AsyncEngineClient], Awaitable[None]]) -> None:
    async def main() -> None:
        client = AsyncEngineClient(FakeEngine.build)
        await client.start(config)
        try:
            await use(client)
        finally:
            await client.close()

    asyncio.run(main())


def requests(client: AsyncEngineClient, text: str, n: int = 1, max_tokens: int = 6) -> list[Request]:
    ids = [ord(char) % client.info.vocab_size for char in text]
    return make_requests(f"r-{text}-{n}", ids, SamplingParams(n=n, max_tokens=max_tokens))


def test_client_streams_aborts_and_closes(config: EngineConfig) -> None:
    async def use(client: AsyncEngineClient) -> None:
        assert client.alive
        assert client.info.max_model_len == FakeEngine.max_model_len
        events = [event async for event in client.submit(requests(client, "ab", n=3))]
        assert sorted(event.index for event in events if event.finish) == [0, 1, 2]
        assert client.active == 0

        stream = client.submit(requests(client, "cd", n=2, max_tokens=200))
        await anext(stream)
        assert client.active == 2
        await stream.aclose()
        assert client.active == 0
        assert (await client.metrics())["requests_running"] == 0

        several = await asyncio.gather(*(client.metrics() for _ in range(5)))
        assert len(several) == 5

    with_client(config, use)


def test_abort_ends_a_stream_with_its_reason(config: EngineConfig) -> None:
    async def use(client: AsyncEngineClient) -> None:
        (request,) = requests(client, "ab", max_tokens=200)
        stream = client.submit([request])
        await anext(stream)
        client.abort([request.id, "unknown"])
        rest = [event async for event in stream]
        assert rest[-1].finish is FinishReason.ABORT

    with_client(config, use)


def test_closed_client_takes_nothing(config: EngineConfig) -> None:
    async def use(client: AsyncEngineClient) -> None:
        await client.drain(1)
        with pytest.raises(EngineStopped, match="draining"):
            await anext(client.submit(requests(client, "a")))
        await client.close()
        assert not client.alive
        with pytest.raises(EngineStopped):
            await client.metrics()

    with_client(config, use)


def test_refusal_carries_its_field(config: EngineConfig, tokenizer_folder: Path) -> None:
    from cospec.models.hf_tokenizer import tokenizer_of
    from cospec.text.tokenizer import TextTokenizer

    async def use(client: AsyncEngineClient) -> None:
        tokens = TextTokenizer(tokenizer_of(str(tokenizer_folder)), 256, client.info.vocab_size)
        refused = make_requests("r", tokens.encode("REFUSE"), SamplingParams())
        with pytest.raises(RequestRefused) as error:
            await anext(client.submit(refused))
        assert error.value.field == "prompt"
        assert isinstance(error.value, CospecError)

    with_client(config, use)


class Unbalanced(FakeEngine):
    """Has work for one step; its integrity check always fails."""

    has_work = True
    seen: tuple[str, ...] = ()

    def step(self) -> list[Event]:
        self.has_work, self.seen = False, (*self.seen, "step")
        return []

    def on_idle(self) -> None:
        self.seen = (*self.seen, "idle")

    def check_integrity(self) -> None:
        self.seen = (*self.seen, "check")
        raise AssertionError("a page is leaked")


class Commands:
    """A connection without messages until the loop has waited three times; then ``Measure`` and ``Stop`` come."""

    def __init__(self) -> None:
        self.waits = 0
        self.sent: list[Any] = []

    def fileno(self) -> int:
        return 0

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def poll(self, seconds: float = 0.0) -> bool:
        return False

    def receive(self, seconds: float | None = None) -> Measure | Stop | None:
        self.waits += seconds != 0
        if self.waits == 3:
            self.waits += 1
            return Measure()
        return Stop() if self.waits > 4 else None


def test_an_idle_engine_learns_and_checks_once(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    engine = Unbalanced(config)
    commands = Commands()
    EngineCoreProc(engine, commands, ProgressCounter(bytearray(ProgressCounter.SIZE))).run()
    assert engine.seen == ("step", "idle", "check")
    (found,) = [message.metrics for message in commands.sent if isinstance(message, Measured)]
    assert (found["integrity_checks"], found["integrity_errors"]) == (1, 1)
    assert "a page is leaked" in caplog.text
