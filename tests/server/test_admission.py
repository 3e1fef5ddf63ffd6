"""The queue is bounded, keys share the queue, calls have a rate and a deadline."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cospec.errors import InvalidInput
from cospec.server.admission import Admission, AdmissionLimits
from cospec.server.errors import Overloaded
from cospec.server.settings import ServerSettings
from harness.waiting import until
from server.test_errors import error_of
from server.test_operations import active, engine_running

if TYPE_CHECKING:
    from server.conftest import Running


def limits_of(**given: Any) -> AdmissionLimits:
    return AdmissionLimits.of(ServerSettings(**given), max_num_seqs=64)


def test_the_default_queue_follows_what_the_engine_runs_at_once() -> None:
    assert limits_of().outputs == 256
    assert AdmissionLimits.of(ServerSettings(), max_num_seqs=2).outputs == ServerSettings().max_outputs
    assert limits_of(max_concurrent_requests=3).outputs == 3


def test_one_key_may_fill_the_queue_and_one_of_several_half() -> None:
    assert limits_of(api_key="a").outputs_per_key == 256
    assert limits_of(api_key=["a", "b"]).outputs_per_key == 128
    assert limits_of(api_key=["a", "b"], max_key_share=0.25).outputs_per_key == 64
    assert limits_of(max_concurrent_requests=1, max_key_share=0.25).outputs_per_key == 1


def test_a_full_queue_refuses_until_places_are_free() -> None:
    admission = Admission(AdmissionLimits(outputs=3))
    with pytest.raises(InvalidInput, match="n is giving 4 outputs"):
        admission.take(0, 4)
    admission.take(0, 2)
    with pytest.raises(Overloaded) as refused:
        admission.take(0, 2)
    assert refused.value.retry_after == 1
    admission.take(0, 1)
    with pytest.raises(Overloaded, match="3 of 3"):
        admission.arrive(0, now=0.0)
    admission.release(0, 2)
    admission.arrive(0, now=0.0)
    admission.take(0, 2)


def test_a_key_leaves_room_for_others() -> None:
    admission = Admission(AdmissionLimits(outputs=4, key_share=0.5))
    admission.take(0, 2)
    with pytest.raises(Overloaded, match="2 of 2"):
        admission.arrive(0, now=0.0)
    admission.take(1, 2)


def test_rate_of_a_key() -> None:
    admission = Admission(AdmissionLimits(requests_per_minute=2))
    for _ in range(2):
        admission.arrive(0, now=100.0)
    with pytest.raises(Overloaded, match="2 requests") as refused:
        admission.arrive(0, now=110.0)
    assert refused.value.retry_after in (20, 21)  # two a minute: the next after 30 seconds
    admission.arrive(1, now=110.0)
    admission.arrive(0, now=131.0)
    with pytest.raises(Overloaded):
        admission.arrive(0, now=132.0)
    for _ in range(2):  # a long rest gives one minute's calls, no more
        admission.arrive(0, now=10_000.0)
    with pytest.raises(Overloaded):
        admission.arrive(0, now=10_000.0)


def test_bodies_have_a_bound_and_a_key_its_share() -> None:
    admission = Admission(AdmissionLimits(body_bytes=100, key_share=0.6))
    admission.take_bytes(0, 60)
    with pytest.raises(Overloaded):
        admission.take_bytes(0, 1)
    admission.take_bytes(1, 40)
    with pytest.raises(Overloaded):
        admission.take_bytes(1, 1)
    admission.release(0, 0, 60)
    admission.take_bytes(1, 20)
    large = 2**40  # a key has room for one body of the largest size
    limits = limits_of(api_key=["a", "b"], max_body_bytes=large)
    Admission(limits).take_bytes(0, large)


def test_bodies_that_do_not_end_leave_memory_free(
    server_of: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cospec.server.admission.BODY_BYTES", 3000)
    server = server_of(max_body_bytes=2000)
    host, port = server.url.removeprefix("http://").split(":")
    body = {"prompt": "a" * 200, "max_tokens": 1, "stop": ["b" * 250] * 6}
    with socket.create_connection((host, int(port)), timeout=30) as sender:
        sender.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n" + b"a" * 1900)
        until(lambda: server.post("/v1/completions", **body).status_code == 429, seconds=20)
        assert error_of(server.post("/tokenize", prompt="a" * 1500), 429)["code"] == "rate_limit_exceeded"
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    until(lambda: server.post("/v1/completions", **body).status_code == 200)


ACTIONS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.booleans()), max_size=60)


@settings(max_examples=100)
@given(actions=ACTIONS, share=st.sampled_from([0.25, 0.5, 1.0]))
def test_no_order_of_calls_passes_the_bounds(actions: list[tuple[int, int, bool]], share: float) -> None:
    limits = AdmissionLimits(outputs=8, key_share=share)
    admission, held = Admission(limits), {key: list[int]() for key in range(3)}
    for key, outputs, leave in actions:
        if leave and held[key]:
            admission.release(key, held[key].pop())
        try:
            admission.take(key, outputs)
        except (Overloaded, InvalidInput):
            continue
        held[key].append(outputs)
        assert sum(held[key]) <= limits.outputs_per_key
        assert sum(map(sum, held.values())) == admission.held <= limits.outputs


def test_a_full_queue_answers_429_before_the_body_is_read(server_of: Callable[..., Running]) -> None:
    server = server_of(max_concurrent_requests=2)
    assert "at most 2" in error_of(server.post("/v1/completions", prompt="a", n=3), 400)["message"]
    body = {"prompt": "FOREVER", "n": 2, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: dropping it would close the connection
        assert next(lines)
        refused = httpx.post(f"{server.url}/v1/completions", content=b"no JSON")
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "1"
        assert server.http.get("/health").status_code == 200
    until(lambda: active(server) == 0)
    until(lambda: server.post("/v1/completions", prompt="ab", max_tokens=2).status_code == 200)


@pytest.mark.parametrize("prompt", ["REFUSE", "", "x" * 300, "STUMBLE"])
def test_a_call_that_fails_gives_its_places_back(server_of: Callable[..., Running], prompt: str) -> None:
    server = server_of(max_concurrent_requests=2)
    for _ in range(4):
        assert server.post("/v1/completions", prompt=prompt, n=2).status_code in (400, 500)
    assert server.post("/v1/completions", prompt="ab", n=2, max_tokens=2).status_code == 200


def test_keys_share_the_queue(server_of: Callable[..., Running]) -> None:
    server = server_of(api_key=["one", "two"], max_concurrent_requests=4)
    other = {"Authorization": "Bearer two"}
    body = {"prompt": "FOREVER", "n": 2, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: dropping it would close the connection
        assert next(lines)
        assert "This key holds" in error_of(server.post("/v1/completions", prompt="a"), 429)["message"]
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json={"prompt": "ab", "max_tokens": 2}, headers=other).status_code == 200


def test_rate_is_answered_with_the_time_to_wait(server_of: Callable[..., Running]) -> None:
    server = server_of(requests_per_minute=2)
    assert [server.post("/v1/completions", prompt="a", max_tokens=1).status_code for _ in range(3)] == [200, 200, 429]
    refused = server.post("/v1/completions", prompt="a", max_tokens=1)
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert server.post("/tokenize", prompt="a").status_code == 200


def test_deadline_ends_a_call(server_of: Callable[..., Running]) -> None:
    server = server_of(request_timeout=0.2)
    error = error_of(server.post("/v1/completions", prompt="FOREVER", n=2), 504)
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert "0.2 seconds" in error["message"]
    streamed = server.post("/v1/completions", prompt="FOREVER", stream=True)
    *_, last, done = [line for line in streamed.text.splitlines() if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    until(lambda: engine_running(server) == 0)
    assert server.post("/v1/completions", prompt="ab", max_tokens=2).json()["choices"][0]["text"] == "ab"


def test_deadline_covers_the_tokenization(server_of: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    from cospec.text.tokenizer import TextTokenizer

    def slow(self: TextTokenizer, text: str, add_special_tokens: bool = True, field: str = "prompt") -> tuple[int, ...]:
        time.sleep(0.3)
        return (1, 2, 3)

    monkeypatch.setattr(TextTokenizer, "encode", slow)
    server = server_of(request_timeout=0.2)
    assert server.post("/v1/completions", prompt="ab", max_tokens=1).status_code == 504
    assert active(server) == 0


def test_deadline_covers_waiting_requests(server_of: Callable[..., Running]) -> None:
    server = server_of(request_timeout=0.2)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", prompt="FOREVER"), range(8)))
    assert {answer.status_code for answer in answers} == {504}


def test_stream_closed_before_its_first_token(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "SLOW", "max_tokens": 5, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(10):
        with socket.create_connection((host, int(port))) as sender:
            sender.sendall(head + body)
    until(lambda: active(server) == 0)
    assert server.post("/v1/completions", prompt="ab", max_tokens=1).status_code == 200
    assert "StopAsyncIteration" not in caplog.text
    assert "Exception in ASGI application" not in caplog.text
