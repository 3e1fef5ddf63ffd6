"""Clients that send nothing, or read nothing, cannot keep others out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI
from uvicorn.server import ServerState

from cospec.server.connections import (
    MAX_HEAD_BYTES,
    MIN_CONNECTIONS,
    PROGRESS_BYTES,
    TimedConfig,
    TimedProtocol,
    connection_limit,
)
from cospec.server.settings import ServerSettings
from harness.waiting import until
from server.test_operations import active

if TYPE_CHECKING:
    from server.conftest import Running

TESTS = Path(__file__).parents[1]
FILES = 300
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
SERVE = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
sys.path.insert(0, {str(TESTS)!r})
from server.fake_engine import FakeEngine
from cospec.config import EngineConfig
from cospec.server.run import run
from cospec.server.settings import ServerSettings
config = EngineConfig(model="fake", tokenizer=sys.argv[1])
run(config, ServerSettings(port=0), lambda url: print(url, flush=True), FakeEngine.build)
"""


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def closes(client: socket.socket) -> bytes:
    """What comes until the server closes the connection; fails where the server does not."""
    found = b""
    try:
        while part := client.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\nA: "])
def test_a_head_has_to_come_in_time(server_of: Callable[..., Running], sent: bytes) -> None:
    server = server_of(header_timeout=0.2)
    with connect(server) as client:
        client.sendall(sent)
        assert closes(client).startswith(b"HTTP/1.1 408")


def test_single_bytes_do_not_move_the_deadline(server_of: Callable[..., Running]) -> None:
    server = server_of(header_timeout=0.5)
    with connect(server) as client:
        client.settimeout(0.05)
        for byte in b"GET /health HTTP/1.1\r\nHost: " + b"x" * 5000:
            try:
                client.sendall(bytes([byte]))
                if client.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    pytest.fail("the connection outlived its deadline")


def test_a_body_has_to_come_in_time(server_of: Callable[..., Running]) -> None:
    server = server_of(body_timeout=0.2)
    with connect(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        head, _, body = closes(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["message"].endswith("closes.")


def test_the_rest_of_a_refused_body_has_to_come_in_time(server_of: Callable[..., Running]) -> None:
    server = server_of(body_timeout=0.2, keep_alive_timeout=100)
    with connect(server) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n{")
        answers = closes(client)
    assert answers.startswith(b"HTTP/1.1 413")
    assert answers.count(b"HTTP/1.1") == 1


def test_an_idle_connection_closes(server_of: Callable[..., Running]) -> None:
    server = server_of(keep_alive_timeout=1)
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert closes(client).startswith(b"HTTP/1.1 200")


def test_a_second_request_of_a_connection_has_to_come_in_time(server_of: Callable[..., Running]) -> None:
    server = server_of(header_timeout=0.2, keep_alive_timeout=100)
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /")
        assert b"HTTP/1.1 408" in closes(client)


def test_a_client_that_reads_nothing_is_dropped(server_of: Callable[..., Running]) -> None:
    server = server_of(write_timeout=0.2)
    body = json.dumps({"prompt": "FOREVER", "stream": True, "logprobs": 20, "n": 100}).encode()
    with connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: active(server) == 100)
        until(lambda: active(server) == 0, seconds=60)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000, 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 100_000, 431),
        (b"GET /" + b"b" * 100_000, 431),
        (b"GET\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (CHUNKED + b"1\r\n{\r\n0\r\n" + b"A: b\r\n" * 20_000, 431),
        (CHUNKED + b"1;" + b"a" * 100_000, 431),
    ],
)
def test_what_is_no_request_gets_an_error_and_no_second_one(
    server_of: Callable[..., Running], sent: bytes, status: int
) -> None:
    with connect(server_of(write_timeout=0.5)) as client:
        with contextlib.suppress(OSError):  # the server may have closed the connection
            client.sendall(sent)
        head, _, body = closes(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["message"].endswith("closes.")


def test_a_head_of_the_largest_size_is_read(server_of: Callable[..., Running]) -> None:
    with connect(server_of(keep_alive_timeout=1)) as client:
        head = b"GET /health HTTP/1.1\r\nHost: x\r\nA: "
        client.sendall(head + b"b" * (MAX_HEAD_BYTES - len(head) - 4) + b"\r\n\r\n")
        assert closes(client).startswith(b"HTTP/1.1 200")


def test_requests_of_one_connection_are_answered_in_order(server_of: Callable[..., Running]) -> None:
    """Also where the client does not wait for answers, and offers another protocol."""
    body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    calls = [
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ]
    with connect(server_of()) as client:
        client.sendall(calls[0])
        models = client.recv(65536)
        client.sendall(b"".join(calls[1:]))
        answers = models + closes(client)
    assert answers.count(b"HTTP/1.1 200 OK") == len(calls)
    assert [answers.count(part) for part in (b'"object":"list"', b'"text_completion"')] == [1, 2]


def test_time_limits_leave_slow_answers_alone(server_of: Callable[..., Running]) -> None:
    server = server_of(header_timeout=0.2, body_timeout=0.2, keep_alive_timeout=1)
    for stream in (False, True):
        assert server.post("/v1/completions", prompt="SLOW", max_tokens=100, stream=stream).status_code == 200


def test_clients_that_read_nothing_block_no_other_client(server_of: Callable[..., Running]) -> None:
    server = server_of(max_connections=3, max_concurrent_requests=1000)
    body = json.dumps({"prompt": "FOREVER", "stream": True, "logprobs": 20, "n": 100}).encode()
    clients = [connect(server) for _ in range(3)]
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert client.recv(9) == b"HTTP/1.1 "
    until(lambda: _answers(server), seconds=30)  # once the streams fill their connections; the write timeout is 60 s
    for client in clients:
        client.close()
    until(lambda: active(server) == 0)


class Clock:
    """The loop's timers; ``pass_time`` runs the one that is set."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: object) -> Timer:
        self.timers.append(Timer(self, call, arguments))
        return self.timers[-1]

    def create_task(self, application: Coroutine[Any, Any, None], **_: object) -> asyncio.Future[None]:
        """Start no application: the test answers the request."""
        application.close()
        return cast("asyncio.Future[None]", Mock(asyncio.Future))

    def pass_time(self) -> None:
        (timer,) = self.timers
        timer.cancel()
        timer.call(*timer.arguments)


@dataclass(eq=False)
class Timer:
    clock: Clock
    call: Callable[..., None]
    arguments: tuple[object, ...]

    def cancel(self) -> None:
        if self in self.clock.timers:
            self.clock.timers.remove(self)


class Socket(asyncio.Transport):
    """A transport with ``unsent`` bytes that no client has read."""

    unsent, closing, aborted = 0, False, False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None:
        """Nothing is read here."""


@pytest.mark.parametrize("ending", ["keep-alive", "answer", None])
def test_a_connection_that_closes_waits_for_a_client_that_makes_progress(ending: str | None) -> None:
    config, clock, transport = TimedConfig(FastAPI(), ServerSettings(), 5), Clock(), Socket()
    protocol = TimedProtocol(config, ServerState(), {}, cast(asyncio.AbstractEventLoop, clock))
    protocol.connection_made(transport)
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    transport.unsent = 10 * PROGRESS_BYTES
    protocol.pause_writing()
    if ending == "keep-alive":
        protocol.timeout_keep_alive_handler()
    elif ending == "answer":
        transport.closing = True
        protocol.on_response_complete()
    for _ in range(3):
        transport.unsent -= PROGRESS_BYTES
        clock.pass_time()
        assert not transport.aborted
    if ending is not None:  # the rest of an answer, less than what pauses an application
        protocol.resume_writing()
    assert list(config.waiting) == [protocol]
    clock.pass_time()
    assert transport.aborted
    protocol.connection_lost(None)
    assert not clock.timers and not config.waiting


@pytest.mark.parametrize("sent", [b"", b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"])
def test_clients_that_send_nothing_block_no_other_client(server_of: Callable[..., Running], sent: bytes) -> None:
    server = server_of(max_connections=10)
    clients = [connect(server) for _ in range(50)]
    for client in clients:
        client.sendall(sent)
    for _ in range(20):
        assert httpx.get(f"{server.url}/health").status_code == 200
    closes(clients[0])
    for client in clients:
        client.close()


def test_new_connections_close_where_all_others_are_at_work(
    server_of: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    server = server_of(max_connections=3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 37\r\n\r\n"
    clients = [connect(server) for _ in range(3)]
    for client in clients:
        client.sendall(head + b'{"prompt": "FOREVER", "stream": true}')
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    for _ in range(30):
        with connect(server) as refused:
            assert closes(refused) == b""
    assert len([record for record in caplog.records if "refuses new ones" in record.message]) == 1
    clients.pop().close()
    until(lambda: _answers(server))
    for client in clients:
        client.close()
    until(lambda: active(server) == 0)


def _answers(server: Running) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_the_limit_stays_below_the_files_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    for limits, wanted, found in [
        ((256, 4096), 1024, 1024), ((1024, 1024), 2000, 832), ((64, 64), 1024, MIN_CONNECTIONS),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 5000, 5000),
    ]:  # fmt: skip
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert connection_limit(wanted) == found
    assert raised[0] == (1216, 4096)


def test_more_connections_than_files_fill_no_log(tokenizer_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(tokenizer_folder)],
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        host, port = url.removeprefix("http://").split(":")
        clients = [socket.create_connection((host, int(port)), timeout=30) for _ in range(2 * FILES)]
        try:
            for _ in range(5):
                assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        finally:
            for client in clients:
                client.close()
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)
            process.stdout.close()
    assert len(log.read_text().splitlines()) < 10
