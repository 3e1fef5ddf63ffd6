"""/v1/chat/completions: the template, messages, log-probabilities, streams."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from server.conftest import Running

USER = {"role": "user", "content": "hi"}


def ask(server: Running, *messages: Any, **body: object) -> httpx.Response:
    return server.post("/v1/chat/completions", messages=list(messages) or [USER], **body)


def test_answer_has_openai_shape_and_distribution(server: Running) -> None:
    answer = ask(server, max_tokens=3).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["distribution"] == "target"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "u: ", "refusal": None}
    assert choice["finish_reason"] == "length"


def test_template_reads_roles_and_parts(server: Running) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    answer = ask(server, {"role": "developer", "content": "S"}, parts, max_completion_tokens=12).json()
    assert answer["choices"][0]["message"]["content"] == "s: S\nu: ab\na"


def test_max_completion_tokens_wins_over_max_tokens(server: Running) -> None:
    assert ask(server, max_tokens=9, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_logprobs_shape(server: Running) -> None:
    found = ask(server, logprobs=True, top_logprobs=2, max_tokens=2).json()["choices"][0]["logprobs"]
    assert found["refusal"] is None
    first = found["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("u", -0.5, [ord("u")])
    assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.5, -1.5]
    assert ask(server, logprobs=True, max_tokens=1).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert ask(server, max_tokens=1).json()["choices"][0]["logprobs"] is None


def test_stream_opens_each_choice_with_its_role(server: Running) -> None:
    body = {"messages": [USER], "n": 2, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    by_choice: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for chunk in chunks[:-1]:
        by_choice[chunk["choices"][0]["index"]].append(chunk["choices"][0])
    for choices in by_choice.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "u: hi"
        assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([USER, {"role": "system", "content": "late"}], "messages"),
    ],
)
def test_bad_messages_are_refused_by_name(server: Running, messages: Any, param: str) -> None:
    response = server.post("/v1/chat/completions", messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_image_parts_are_refused(server: Running) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    response = ask(server, image)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages[0].content")


@pytest.mark.parametrize("key", ["tools", "functions", "response_format", "tool_choice", "function_call"])
def test_unsupported_features_are_refused_with_a_reason(server: Running, key: str) -> None:
    response = ask(server, **{key: [{"type": "function"}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == key
    assert "not supported" in error["message"]


def test_harmless_values_of_unsupported_keys_pass(server: Running) -> None:
    assert ask(server, tools=[], tool_choice="none", response_format={"type": "text"}, max_tokens=1).status_code == 200


def test_top_logprobs_need_logprobs(server: Running) -> None:
    response = ask(server, top_logprobs=3)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
