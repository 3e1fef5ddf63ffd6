"""The official client works against the server, streaming and not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from server.conftest import Running


def test_completions(server: Running) -> None:
    answer = server.openai.completions.create(model="fake", prompt="abc", max_tokens=4, logprobs=1, n=2)
    assert [choice.text for choice in answer.choices] == ["abca", "abca"]
    assert answer.choices[0].logprobs.token_logprobs == [-0.5] * 4
    assert answer.usage.completion_tokens == 8
    assert answer.distribution == "target"


def test_streamed_completions(server: Running) -> None:
    options = {"include_usage": True}
    chunks = list(
        server.openai.completions.create(model="fake", prompt="abc", max_tokens=4, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "abca"
    assert chunks[-1].usage.total_tokens == 7


def test_chat(server: Running) -> None:
    answer = server.openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=1,
        extra_body={"speculation": {"length": 2}, "include_speculation_stats": True},
    )
    assert answer.choices[0].message.content == "u: h"
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "u"
    assert answer.usage.speculation["drafts"] == 2


def test_an_answer_can_be_sent_back_as_it_came(server: Running) -> None:
    """Clients append the message object, or what it holds, and ask on."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for form in (lambda message: message, lambda message: message.model_dump()):
        said = server.openai.chat.completions.create(model="fake", messages=messages, max_tokens=4).choices[0].message
        messages = [*messages[:1], form(said), {"role": "user", "content": "on"}]
        answer = server.openai.chat.completions.create(model="fake", messages=messages, max_tokens=12)
        assert answer.choices[0].message.content == "u: hi\na: u: "
        messages = messages[:1]
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]})
    with pytest.raises(openai.BadRequestError, match="tool_calls"):
        server.openai.chat.completions.create(model="fake", messages=messages)


def test_streamed_chat(server: Running) -> None:
    stream = server.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "u: hi"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_models(server: Running) -> None:
    assert [model.id for model in server.openai.models.list()] == ["fake"]
    assert server.openai.models.retrieve("fake").id == "fake"


def test_errors_are_the_clients_own(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        server.openai.completions.create(model="fake", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="other", prompt="a")
    with pytest.raises(openai.InternalServerError):
        server.openai.completions.create(model="fake", prompt="BREAK")


def test_error_in_a_stream_is_raised(server: Running) -> None:
    stream = server.openai.completions.create(model="fake", prompt="FOREVER", stream=True)
    next(stream)
    server.post("/v1/completions", prompt="COLLAPSE")
    with pytest.raises(openai.APIError):
        list(stream)
