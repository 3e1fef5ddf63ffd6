"""Every mistake gets OpenAI's error form, one sentence, and harms no other request."""

from __future__ import annotations

import concurrent.futures
import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from server.conftest import Running


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param", "expected"),
    [
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 0}, "n", "from 1"),
        ({"n": True}, "n", "True"),
        ({"logprobs": 99}, "logprobs", "20"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "token id"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", "token id"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token id"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "a whole number from 0 up"),
        ({"allowed_token_ids": [2**40]}, "allowed_token_ids", "ids from 0 to"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids", "non-empty lists"),
        ({"bad_words_token_ids": [[1, 2**40]]}, "bad_words_token_ids", "ids from 0 to"),
        ({"bad_words_token_ids": [1]}, "bad_words_token_ids[0]", "a list"),
        ({"logits_processors": {"a": 1}}, "logits_processors.a", "an object"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"stop": 5}, "stop", "a string or a list"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"best_of": 3}, "best_of", "equal to n"),
        ({"suffix": "x"}, "suffix", "absent"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
        ({"speculation": {"length": -1}}, "speculation.length", "0"),
        ({"speculation": {"lenght": 1}}, "speculation.lenght", "length"),
        ({"speculation": {"enabled": "no"}}, "speculation.enabled", "true or false"),
        ({"speculation": {"drafters": "a"}}, "speculation.drafters", "a list"),
        ({"prompt": 5}, "prompt", "5"),
        ({"prompt": [1, "a"]}, "prompt", "a list of token ids"),
        ({"prompt": []}, "prompt", "at least one prompt"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": [[]]}, "prompt", "at least one token"),
        ({"prompt": [100000]}, "prompt", "100000"),
        ({"prompt": "x" * 256}, "prompt", "255"),
        ({"prompt": "x" * 100_000}, "prompt", "256 tokens"),
        ({"prompt": "REFUSE"}, "prompt", "another one"),
        ({"prompt": "\ud800"}, "prompt", "whole Unicode characters"),
        ({"stop": "\ud800"}, "stop", "whole Unicode characters"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids", "ids from 0 to"),
        ({"logit_bias": {str(2**70): 1}}, "logit_bias", "ids from 0 to"),
        ({"max_tokens": 2**70}, "max_tokens", "from 1 to 9223372036854775807"),
        ({"max_tokens": "five"}, "max_tokens", "'five'; allowed is a whole number from 1 to"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5; allowed is a whole number from 1 to"),
        ({"n": "x"}, "n", "'x'; allowed is a whole number from 1 to 128."),
        ({"top_k": "x"}, "top_k", "from -1 to"),
        ({"temperature": "x"}, "temperature", "a number from 0 to 100."),
        ({"prompt_logprobs": "x"}, "prompt_logprobs", "from 0 to 20."),
        ({"speculation": 5}, "speculation", "5"),
        ({"\ud800": 1}, "body", "a JSON object"),
        ({"suffix": "x" * 10_000}, "suffix", " ... "),
    ],
)
def test_bad_fields_are_named(server: Running, body: dict[str, Any], param: str, expected: str) -> None:
    error = error_of(server.post("/v1/completions", **{"prompt": "a", **body}), 400)
    assert error["param"] == param
    assert expected in error["message"]
    assert error["type"] == "invalid_request_error"


def test_missing_prompt(server: Running) -> None:
    error = error_of(server.post("/v1/completions", max_tokens=1), 400)
    assert error["param"] == "prompt"
    assert error["message"].startswith("prompt is missing; allowed is a string, a list of strings, ")
    body = {"messages": [{"role": "user", "contnt": "a"}]}
    error = error_of(server.post("/v1/chat/completions", **body), 400)
    assert error["param"] == "messages[0].content"
    assert "a string or a list of parts" in error["message"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"text"', b"\xff\xfe\x00", b"[" * 100_000])
def test_body_that_is_no_object(server: Running, data: Any) -> None:
    assert "JSON" in error_of(server.http.post("/v1/completions", content=data), 400)["message"]


def test_unknown_model_path_and_method(server: Running) -> None:
    error = error_of(server.post("/v1/completions", model="gpt-9", prompt="a"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'fake'" in error["message"]
    error_of(server.http.get("/v1/models/gpt-9"), 404)
    assert "/v1/nothing" in error_of(server.http.get("/v1/nothing"), 404)["message"]
    response = server.http.get("/v1/completions")
    assert "POST" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"


def test_streamed_request_is_refused_by_status(server: Running) -> None:
    error_of(server.post("/v1/completions", prompt="REFUSE", stream=True), 400)


def test_one_refused_prompt_refuses_the_call(server: Running) -> None:
    error_of(server.post("/v1/completions", prompt=["FOREVER", "REFUSE"], max_tokens=200), 400)
    assert server.run(lambda: server.client.active) == 0


@pytest.mark.parametrize("prompt", ["BREAK", "COLLAPSE", "STUMBLE"])
def test_failure_in_the_engine_is_a_server_error(server: Running, prompt: str) -> None:
    error = error_of(server.post("/v1/completions", prompt=prompt), 500)
    assert error["type"] == "server_error"
    assert server.post("/v1/completions", prompt="ab", max_tokens=2).json()["choices"][0]["text"] == "ab"


def test_failing_request_leaves_its_neighbours_alone(server: Running) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        neighbour = pool.submit(server.post, "/v1/completions", prompt="SLOW", max_tokens=100)
        broken = [pool.submit(server.post, "/v1/completions", prompt="BREAK") for _ in range(3)]
        assert [future.result().status_code for future in broken] == [500] * 3
        assert neighbour.result().json()["usage"]["completion_tokens"] == 100


def test_failure_inside_a_stream_is_reported_in_the_stream(server: Running) -> None:
    body = {"prompt": "FOREVER", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert "choices" in next(line for line in lines if line)
        assert server.post("/v1/completions", prompt="COLLAPSE").status_code == 500
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("body", "param", "expected"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens", "a whole number from 1 to 9223372036854775807"),
        ({"logprobs": True, "top_logprobs": 25}, "top_logprobs", "20"),
        ({"messages": []}, "messages", "a list of at least 1"),
        ({"messages": [5]}, "messages[0]", "an object"),
    ],
)
def test_chat_names_the_field_that_was_given(server: Running, body: dict[str, Any], param: str, expected: str) -> None:
    given = {"messages": [{"role": "user", "content": "a"}], **body}
    error = error_of(server.post("/v1/chat/completions", **given), 400)
    assert error["param"] == param
    assert error["message"].endswith(f"{expected}.")


def test_client_disconnects_while_sending(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sender:
        sender.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert server.http.get("/health").status_code == 200
    assert server.post("/v1/completions", prompt="ab", max_tokens=1).status_code == 200
    assert "Exception in ASGI application" not in caplog.text
