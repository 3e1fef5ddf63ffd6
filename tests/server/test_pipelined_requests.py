"""Clients that send requests before earlier requests have their answers."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from cospec.server import connections
from harness.waiting import until
from server.test_connections import closes, connect
from server.test_operations import active

if TYPE_CHECKING:
    from server.conftest import Running

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
OFFER = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
LONG_HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 100_000


def call(headers: bytes = b"Host: x\r\n", **fields: object) -> bytes:
    body = json.dumps(fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\n" + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(headers: bytes, body: bytes, trailers: bytes = b"") -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\n" + headers + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n" % len(body) + body + b"\r\n0\r\n" + trailers + b"\r\n"


def statuses(answers: bytes) -> list[int]:
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


def test_few_requests_of_a_connection_wait(server_of: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = []

    class Recorded(connections.TimedProtocol):
        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            waiting.append(len(self.pipeline))

    monkeypatch.setattr(connections, "TimedProtocol", Recorded)
    count = 6 * connections.READ_BYTES // len(HEALTH)
    with connect(server_of()) as client:
        sender = threading.Thread(target=lambda: client.sendall(HEALTH * count + LAST))
        sender.start()
        answers = closes(client)
        sender.join()
    assert statuses(answers) == [200] * (count + 1)
    assert max(waiting) <= connections.MAX_PIPELINED + connections.READ_BYTES // len(HEALTH) + 1


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("encoding", ["length", "chunks"])
def test_an_offer_of_another_protocol_costs_no_body(
    server_of: Callable[..., Running], encoding: str, split: bool
) -> None:
    body = {"prompt": "a", "max_tokens": 3}
    sent = call(OFFER, **body) if encoding == "length" else chunked(OFFER, json.dumps(body).encode())
    end_of_head = sent.index(b"\r\n\r\n") + 4
    with connect(server_of()) as client:
        if split:
            client.sendall(sent[:end_of_head])
            client.settimeout(0.1)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(30)
            sent = sent[end_of_head:]
        client.sendall(sent + HEALTH + LAST)
        answers = closes(client)
    assert statuses(answers) == [200, 200, 200]
    assert answers.count(b'"text_completion"') == 1


def test_a_body_after_an_offer_is_no_request(server: Running) -> None:
    head = b"POST /tokenize HTTP/1.1\r\n" + OFFER + b"Content-Length: %d\r\n\r\n" % len(HEALTH)
    with connect(server) as client:
        client.sendall(head + HEALTH + LAST)
        assert statuses(closes(client)) == [400, 200]


@pytest.mark.parametrize("rest", [b"xyz\r\n", b"1;" + b"e" * 100_000])
def test_a_refused_request_gets_no_second_answer(server: Running, rest: bytes) -> None:
    long = b"a" * 3_000_000
    with connect(server) as client:
        client.sendall(chunked(b"Host: x\r\n", long)[: -len(b"0\r\n\r\n")])
        assert client.recv(4096).startswith(b"HTTP/1.1 413")
        with contextlib.suppress(OSError):  # the server may have closed the connection
            client.sendall(rest)
        assert b"HTTP/1.1" not in closes(client)


def test_a_trailer_is_no_header(server_of: Callable[..., Running]) -> None:
    with connect(server_of(api_key=["secret"], keep_alive_timeout=1)) as client:
        client.sendall(chunked(b"Host: x\r\n", b'{"prompt": "a"}', b"Authorization: Bearer secret\r\n"))
        assert statuses(closes(client)) == [401]


def test_a_client_that_leaves_ends_its_running_request(server_of: Callable[..., Running]) -> None:
    server = server_of()
    with connect(server) as client:
        client.sendall(call(prompt="FOREVER", stream=True) + HEALTH)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: active(server) == 1)
    until(lambda: active(server) == 0)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (LONG_HEAD, [200, 431]),
        (b"GET\r\n\r\n", [200, 400]),
        (HEALTH + b"GET\r\n\r\n", [200, 200, 400]),
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", [200, 400]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_request_waits_for_the_answers_to_earlier_requests(
    server_of: Callable[..., Running], broken: bytes, found: list[int], stream: bool
) -> None:
    with connect(server_of()) as client:
        client.sendall(call(prompt="SLOW", max_tokens=20, stream=stream))
        if stream:
            assert client.recv(9) == b"HTTP/1.1 "
        client.sendall(broken)
        answers = b"HTTP/1.1 " * stream + closes(client)
    assert statuses(answers) == found
    assert answers.count(b"[DONE]" if stream else b'"text_completion"') == 1
