"""What one request may ask for is bounded before any text is tokenized, and other requests go on meanwhile."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cospec.errors import InvalidInput
from cospec.server import bodies
from cospec.server.settings import ServerSettings
from server.test_errors import error_of

if TYPE_CHECKING:
    from server.conftest import Running

BODY = 1_900_000  # bytes, a little below the bound


def full(head: str, item: str, tail: str) -> bytes:
    """A body of ``BODY`` bytes: a list of as many items as fit."""
    return (head + ",".join([item] * (BODY // (len(item) + 1))) + tail).encode()


HOSTILE = {
    "objects": full('{"prompt":[', "{}", "]}"),
    "lists": full('{"prompt":[', "[]", "]}"),
    "texts": full('{"prompt":[', '"a"', "]}"),
    "numbers": full('{"prompt":[', "1.5", "]}"),
    "ids": full('{"prompt":[', "12", "]}"),
    "keys": json.dumps({f"{number:x}": 1 for number in range(150_000)}).encode(),
    "allowed": json.dumps({"prompt": "a", "allowed_token_ids": [1] * 100_000}).encode(),
    "bad words": json.dumps({"prompt": "a", "bad_words_token_ids": [[1] * 100_000]}).encode(),
    "processors": json.dumps({"prompt": "a", "logits_processors": {str(n): {} for n in range(1000)}}).encode(),
    "biases": json.dumps({"prompt": "a", "logit_bias": {str(n): [] for n in range(100_000)}}).encode(),
    "stops": json.dumps({"prompt": "a", "stop": [str(n) for n in range(30_000)]}).encode(),
    "stop ids": full('{"prompt":"a","stop_token_ids":[', "1", "]}"),
    "messages": full('{"messages":[', '{"role":"user","content":"a"}', "]}"),
    "parts": full('{"messages":[{"role":"user","content":[', "5", "]}]}"),
    "quotes": b'{"prompt":"' + b'\\"' * (BODY // 2 - 10),
    "backslash": b"{{{" * 10_000 + b'"' + b'\\"' * (BODY // 2 - 20_000) + b"\\",
    "brackets": b"[" * BODY,
    "other encoding": ('{"prompt":[' + "[]," * 300_000 + "[]]}").encode("utf-16"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_hostile_bodies_get_one_short_sentence(server: Running, path: str, name: str) -> None:
    error = error_of(server.http.post(path, content=HOSTILE[name]), 400)
    assert len(error["message"]) < 1500


def test_a_long_text_is_tokenized_while_the_loop_runs(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from cospec.text.tokenizer import TextTokenizer

    inside, leave = threading.Event(), threading.Event()

    def slow(self: TextTokenizer, text: str, add_special_tokens: bool = True, field: str = "prompt") -> tuple[int, ...]:
        inside.set()
        assert leave.wait(30), "the server answered nothing while it tokenized"
        return (1, 2, 3)

    monkeypatch.setattr(TextTokenizer, "encode", slow)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = [pool.submit(server.post, "/v1/completions", prompt="a", max_tokens=1)]
        answers.append(pool.submit(server.post, "/tokenize", prompt="a"))
        assert inside.wait(30)
        assert server.http.get("/ready").status_code == 200
        leave.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]


def test_calls_that_tokenize_leave_threads_to_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from cospec.text.tokenizer import TextTokenizer

    inside, leave, encode = threading.Event(), threading.Event(), TextTokenizer.encode
    begun: list[str] = []

    def slow(self: TextTokenizer, text: str, add_special_tokens: bool = True, field: str = "prompt") -> tuple[int, ...]:
        if text == "slow":
            begun.append(text)
            inside.set()
            assert leave.wait(60)
        return encode(self, text, add_special_tokens, field)

    monkeypatch.setattr(TextTokenizer, "encode", slow)
    calls = 2 * (len(os.sched_getaffinity(0)) + 4) + 4  # more than the loop has threads
    with concurrent.futures.ThreadPoolExecutor(calls) as pool:
        try:
            answers = [
                pool.submit(httpx.post, f"{server.url}/tokenize", json={"prompt": "slow"}, timeout=60)
                for _ in range(calls)
            ]
            assert inside.wait(30)
            with contextlib.suppress(httpx.TimeoutException):  # this client leaves
                httpx.post(f"{server.url}/tokenize", json={"prompt": "slow"}, timeout=0.5)
            assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
        finally:
            leave.set()
        assert {answer.result().status_code for answer in answers} == {200}
    assert len(begun) == calls, "the server tokenized for a client that had left"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_bound_is_refused(server_of: Callable[..., Running], chunked: bool) -> None:
    server = server_of(max_body_bytes=1000)
    body = json.dumps({"prompt": "a" * 1000}).encode()
    content = (body[at : at + 100] for at in range(0, len(body), 100)) if chunked else body
    error = error_of(server.http.post("/v1/completions", content=content), 413)
    assert "at most 1000 bytes" in error["message"]
    assert server.post("/v1/completions", prompt="ab", max_tokens=2).status_code == 200


@pytest.mark.parametrize("length", ["99999999", "9" * 5000])
def test_too_large_content_length_is_refused_before_the_body(server: Running, length: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sender:
        sender.sendall(f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
        assert sender.recv(4096).startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


@pytest.mark.parametrize(
    ("settings", "body", "param", "expected"),
    [
        ({"max_prompts": 2}, {"prompt": ["a", "b", "c"]}, "prompt", "at most 2 prompts"),
        ({"max_prompts": 2}, {"prompt": [[1], [2], [3]]}, "prompt", "at most 2 prompts"),
        ({"max_outputs": 3}, {"prompt": ["a", "b"], "n": 2}, "n", "at most 3 outputs"),
        ({"max_stop_sequences": 1}, {"stop": ["a", "b"]}, "stop", "at most 1 stop strings"),
        ({"max_logprobs": 2}, {"logprobs": 3}, "logprobs", "from 0 to 2"),
        ({"max_logprobs": 2}, {"prompt_logprobs": 3}, "prompt_logprobs", "from 0 to 2"),
        ({}, {"stop": "x" * 257}, "stop", "256 characters"),
        ({}, {"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
        ({}, {"priority": -1}, "priority", "forbids priorities"),
        ({"max_priority": 5}, {"priority": -6}, "priority", "from -5 to 5"),
        ({"max_priority": 5}, {"priority": -(2**63)}, "priority", "from -5 to 5"),
    ],
)
def test_bounds_are_the_operators(
    server_of: Callable[..., Running], settings: dict[str, Any], body: dict[str, Any], param: str, expected: str
) -> None:
    server = server_of(**settings)
    error = error_of(server.post("/v1/completions", **{"prompt": "a", "max_tokens": 1, **body}), 400)
    assert error["param"] == param
    assert expected in error["message"]


def test_what_is_within_the_bounds_is_served(server_of: Callable[..., Running]) -> None:
    server = server_of(max_prompts=2, max_outputs=4, max_stop_sequences=1, max_priority=5, max_logprobs=1)
    body = {"prompt": ["ab", "cd"], "n": 2, "stop": ["@"], "priority": -5, "logprobs": 1, "max_tokens": 2}
    assert len(server.post("/v1/completions", **body).json()["choices"]) == 4
    assert server.post("/v1/completions", prompt=[1, 2, 3], max_tokens=1).status_code == 200
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 1}
    assert server.post("/v1/chat/completions", **chat, top_logprobs=1).status_code == 200
    assert error_of(server.post("/v1/chat/completions", **chat, top_logprobs=2), 400)["param"] == "top_logprobs"


def test_signs_inside_texts_are_no_structure() -> None:
    bodies.check_structure(json.dumps({"prompt": '{"a": [1]}' * 50_000}).encode())
    with pytest.raises(InvalidInput, match="too large a structure"):
        bodies.check_structure(json.dumps({"prompt": [{"a": [1]}] * 50_000}).encode())


def test_a_prompt_of_many_brackets_is_served(server: Running) -> None:
    found = server.post("/v1/completions", prompt="[" * 50_000, max_tokens=1)
    assert "256 tokens" in error_of(found, 400)["message"]


def test_detokenize_is_bounded(server: Running) -> None:
    assert error_of(server.post("/detokenize", tokens=[1] * 65_537), 400)["param"] == "tokens"


def test_alternatives_have_an_upper_bound() -> None:
    with pytest.raises(ValueError, match="max_logprobs"):
        ServerSettings(max_logprobs=21)


def test_neighbours_are_served_while_hostile_bodies_come(server: Running) -> None:
    body = {"prompt": "SLOW", "max_tokens": 40}
    expected = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        neighbours = [pool.submit(server.post, "/v1/completions", **body) for _ in range(4)]
        statuses = {httpx.post(f"{server.url}/v1/completions", content=data).status_code for data in HOSTILE.values()}
        assert {answer.result().json()["choices"][0]["text"] for answer in neighbours} == {expected}
    assert statuses == {400}
