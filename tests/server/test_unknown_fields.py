"""Keys that clients send and no schema has: ignored, named in a header, passed to the template, or refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cospec.server import template_variables
from cospec.server.schemas import ChatBody
from cospec.server.unknown_fields import BOOKKEEPING, HEADER, MAX_HEADER, REFUSED
from cospec.text.tokenizer import Names

if TYPE_CHECKING:
    from server.conftest import Running

USER = {"role": "user", "content": "hi"}
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, PLAIN: {"prompt": "ab"}}


def ask(server: Running, path: str, **body: Any) -> httpx.Response:
    return server.post(path, **{"max_tokens": 1, **PROMPTS[path], **body})


def prompt(server: Running, **body: Any) -> tuple[str, int]:
    """The prompt that the template made, which the fake engine repeats."""
    answer = server.post(CHAT, **{"messages": [USER], "max_tokens": 60, **body}).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def refused(response: httpx.Response, param: str) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    message: str = error["message"]
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_bookkeeping_changes_nothing_and_is_not_named(server: Running, strict_server: Running, path: str) -> None:
    body = {name: {"any": ["value"]} for name in BOOKKEEPING if "." not in name}
    for each in (server, strict_server):
        answer = ask(each, path, **body)
        assert answer.status_code == 200, answer.text
        assert HEADER not in answer.headers


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_fields_are_refused(server: Running, path: str, name: str) -> None:
    used = {CHAT: ("max_completion_tokens", "top_logprobs"), PLAIN: ("echo", "best_of", "add_special_tokens")}
    if name in used[path]:
        return
    assert "absent" in refused(ask(server, path, **{name: {"wanted": 7}}), name)
    for harmless in (None, [], {}, *REFUSED[name].harmless):
        answer = ask(server, path, **{name: harmless})
        assert answer.status_code == 200, answer.text
        assert HEADER not in answer.headers


# Values with which clients of other servers change the text; the first key of a pair is a switch, the others tune.
SAMPLING_OF_OTHERS: tuple[dict[str, Any], ...] = (
    {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"dry_multiplier": 0.8, "dry_base": 1.75},
    {"mirostat_mode": 2, "mirostat_tau": 5.0},
    {"typical": 0.9},
    {"tfs_z": 0.9},
    {"top_n_sigma": 1.0},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty_range": 64},
    {"do_sample": False},
    {"max_new_tokens": 5},
    {"n_predict": 5},
    {"samplers": ["min_p", "temperature"]},
    {"grammar": 'root ::= "a"'},
    {"num_beams": 4},
)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("given", SAMPLING_OF_OTHERS, ids=lambda given: next(iter(given)))
def test_sampling_fields_of_other_servers_are_never_dropped(server: Running, path: str, given: dict[str, Any]) -> None:
    name, *tuned = given
    refused(ask(server, path, **given), name)
    without = ask(server, path, **{key: given[key] for key in tuned})
    assert without.status_code == 200
    assert without.headers.get(HEADER, "") == ", ".join(tuned)


@pytest.mark.parametrize("path", [CHAT, PLAIN, "/tokenize", "/detokenize"])
def test_unknown_keys_are_named_in_a_header_or_refused(server: Running, strict_server: Running, path: str) -> None:
    others: dict[str, dict[str, Any]] = {"/tokenize": {"prompt": "ab"}, "/detokenize": {"tokens": [1]}}
    given = others.get(path) or PROMPTS[path]
    answer = server.post(path, **given, colour="red", temprature=1, odd=None)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "colour, temprature"
    message = refused(strict_server.post(path, **given, colour="red"), "colour")
    assert message.startswith("key colour is 'red'")
    assert HEADER not in strict_server.post(path, **given).headers


def test_keys_inside_objects_are_named_by_their_path(server: Running, strict_server: Running) -> None:
    message = {"role": "assistant", "content": "a", "provider_specific_fields": {}, "name": "bot"}
    body = {"messages": [USER, message, message], "stream": True, "stream_options": {"deep": 1}}
    answer = server.post(CHAT, **body)
    assert answer.headers[HEADER] == "stream_options.deep, messages.provider_specific_fields, messages.name"
    refused(strict_server.post(CHAT, messages=[USER, {**USER, "colour": 1}]), "messages[1].colour")
    options = {"include_obfuscation": False, "include_usage": True}
    assert HEADER not in ask(server, CHAT, stream=True, stream_options=options).headers
    refused(ask(server, CHAT, speculation={"colour": 1}), "speculation.colour")


@pytest.mark.parametrize("name", ["a\r\nSet-Cookie: b", "ключ", "x" * 5000, "check", "model_config", ""])
def test_any_key_can_stand_in_the_header(server: Running, name: str) -> None:
    answer = ask(server, PLAIN, **{name: 1})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER].isascii() and len(answer.headers[HEADER]) <= MAX_HEADER + 3
    assert "set-cookie" not in answer.headers
    assert answer.json()["choices"][0]["text"] == "a"


def test_a_key_without_a_name_can_stand_last_in_the_header(server: Running) -> None:
    answer = ask(server, PLAIN, **{"colour": 1, "": 1})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == 'colour, ""'


def test_template_variables_reach_the_template(server: Running) -> None:
    plain, _ = prompt(server)
    assert plain.startswith("u: hi\na:u: hi")
    assert prompt(server, reasoning_effort="low")[0].startswith("<low>u: hi\na:<low>")
    assert prompt(server, chat_template_kwargs={"mode": "x", "reasoning_effort": "high"})[0].startswith("<high><x>u: ")
    both = prompt(server, chat_template_kwargs={"reasoning_effort": "high"}, reasoning_effort="low")
    assert both[0].startswith("<low>u: ")


def test_fields_that_the_template_does_not_read_are_named(server: Running, strict_server: Running) -> None:
    body = {
        "verbosity": "low",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False, "mode": "x"},
    }
    for each in (server, strict_server):
        assert ask(each, CHAT, **body).headers[HEADER] == "verbosity, chat_template_kwargs.enable_thinking"
    assert HEADER not in ask(server, CHAT, reasoning_effort="low").headers
    twice = ask(server, CHAT, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert twice.headers[HEADER] == "chat_template_kwargs.reasoning_effort"
    assert ask(server, PLAIN, verbosity="low").headers[HEADER] == "verbosity"
    refused(ask(server, CHAT, chat_template_kwargs={"tokenize": True}), "chat_template_kwargs.tokenize")
    refused(ask(server, CHAT, chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages")
    refused(ask(server, CHAT, chat_template_kwargs=5), "chat_template_kwargs")


@pytest.mark.parametrize(
    ("body", "values", "left"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}, []),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}, []),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
            ["reasoning_effort"],
        ),
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "a"}]}, ["documents"]),
    ],
)
def test_effort_turns_thinking_on_and_off_unless_the_request_does(
    body: dict[str, Any], values: dict[str, Any], left: list[str]
) -> None:
    chat = ChatBody.model_validate({"messages": [USER], **body})
    assert template_variables.variables(chat) == values
    assert template_variables.unread(chat, chat.messages, Names(frozenset({"enable_thinking"}), frozenset())) == left


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_of_earlier_answers_reaches_the_template(server: Running, key: str) -> None:
    messages = [USER, {"role": "assistant", "content": "b", key: "since", "tool_calls": [], "annotations": []}]
    answer = server.post(CHAT, messages=messages, max_tokens=20)
    assert answer.json()["choices"][0]["message"]["content"].startswith("u: hi\na: (since)b\na")
    assert HEADER not in answer.headers


def test_an_answer_continues_the_last_message(server: Running) -> None:
    messages = [USER, {"role": "assistant", "content": "be"}]
    for more in ({}, {"add_generation_prompt": False}):
        found, length = prompt(server, messages=messages, continue_final_message=True, **more)
        assert found.startswith("u: hi\na: beu: hi\na: be"), found
        assert length == len("u: hi\na: be")
    closed, _ = prompt(server, messages=messages, add_generation_prompt=False)
    assert closed.startswith("u: hi\na: be\nu: ")
    both = ask(server, CHAT, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert "add_generation_prompt" in refused(both, "continue_final_message")


def test_tokenize_counts_what_a_chat_would(server: Running) -> None:
    messages = [USER, {"role": "assistant", "content": "be"}]
    body = {"messages": messages, "continue_final_message": True, "chat_template_kwargs": {"mode": "x"}}
    tokens = server.post("/tokenize", **body).json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json()["prompt"] == "<x>u: hi\na: be"
    assert server.post("/tokenize", **body, verbosity="low").headers[HEADER] == "verbosity"
    refused(server.post("/tokenize", **body, add_generation_prompt=True), "continue_final_message")


def test_tool_messages_are_refused_with_the_reason(server: Running) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]}
    tool = {"role": "tool", "content": "4", "tool_call_id": "1"}
    assert "tool calls are not supported" in refused(ask(server, CHAT, messages=[USER, tool]), "messages[1].role")
    assert "tool calls are not supported" in refused(ask(server, CHAT, messages=[call]), "messages[0].tool_calls")


def test_top_logprobs_of_nothing_need_no_logprobs(server: Running) -> None:
    assert ask(server, CHAT, logprobs=False, top_logprobs=0).status_code == 200


def test_the_official_client_sends_all_that_it_knows(server: Running) -> None:
    raw = server.openai.chat.completions.with_raw_response.create(
        model="fake",
        messages=[USER],
        max_completion_tokens=3,
        metadata={"a": "b"},
        modalities=["text"],
        n=1,
        parallel_tool_calls=False,
        prediction={"type": "content", "content": "x"},
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        reasoning_effort="low",
        response_format={"type": "text"},
        safety_identifier="s",
        service_tier="auto",
        store=False,
        stop=None,
        tool_choice="auto",
        user="u",
        verbosity="low",
        extra_body={"chat_template_kwargs": {"mode": "x"}, "min_p": 0.0, "length_penalty": 1.0},
    )
    assert raw.parse().choices[0].message.content == "<lo"
    assert raw.headers[HEADER] == "verbosity"


def test_a_stream_names_ignored_keys_too(server: Running) -> None:
    body = json.dumps({"messages": [USER], "stream": True, "max_tokens": 1, "colour": 1})
    with server.http.stream("POST", CHAT, content=body) as response:
        assert response.headers[HEADER] == "colour"
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
