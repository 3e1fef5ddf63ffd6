"""/v1/completions: prompts, choices, echo, log-probabilities, extensions."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cospec.core.stats import TokenLogprobs
from cospec.core.types import Event
from cospec.models.hf_tokenizer import tokenizer_of
from cospec.sampling_params import SamplingParams
from cospec.server import logprobs, responses
from cospec.server.metrics import ServerMetrics
from cospec.server.responses import CompletionShape
from cospec.server.schemas import CompletionBody
from cospec.server.service import Output, Service
from cospec.server.settings import ServerSettings
from cospec.text.input_processor import make_requests
from cospec.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from server.conftest import Running


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def stream(server: Running, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_answer_has_openai_shape_and_distribution(server: Running) -> None:
    answer = server.post("/v1/completions", model="fake", prompt="abc", max_tokens=5).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    assert answer["distribution"] == "target"
    assert answer["choices"] == [
        {"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["total_tokens"] == 8
    assert "speculation" not in answer["usage"]


def test_default_length_is_sixteen(server: Running) -> None:
    assert server.post("/v1/completions", prompt="a").json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", ["abab"]), (["ab", "cd"], ["abab", "cdcd"]), ([64, 65], None), ([[64, 65], [66]], None)],
)
def test_every_kind_of_prompt(server: Running, prompt: Any, expected: list[str] | None) -> None:
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=4).json()
    several = prompt if isinstance(prompt[0], list) else [prompt]
    if expected is None:
        expected = [server.post("/detokenize", tokens=(ids * 4)[:4]).json()["prompt"] for ids in several]
    assert texts(answer) == expected


def test_choices_are_numbered_by_prompt_then_n(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=["a", "b"], n=2, best_of=2, max_tokens=3).json()
    assert texts(answer) == ["aaa", "aaa", "bbb", "bbb"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 12


def test_stop_string_cuts_the_text(server: Running) -> None:
    choice = server.post("/v1/completions", prompt="abcd", stop="d").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "d")


def test_echo_puts_the_prompt_in_front(server: Running) -> None:
    assert texts(server.post("/v1/completions", prompt="abc", echo=True, max_tokens=2).json()) == ["abcab"]
    chunks = stream(server, prompt="abc", echo=True, max_tokens=4)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcabca"


def test_echo_without_output_scores_the_prompt(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="abc", echo=True, max_tokens=0, logprobs=1).json()
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0


def test_logprobs_shape(server: Running) -> None:
    found = server.post("/v1/completions", prompt="ab", logprobs=2, max_tokens=3).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b", "a"]
    assert found["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert found["text_offset"] == [0, 1, 2]
    assert found["top_logprobs"][0] == {"a": -0.5, "b": -1.5}


def test_logprobs_of_half_a_character_are_written_as_bytes(server: Running) -> None:
    found = server.post("/v1/completions", prompt="é", logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_streamed_offsets_continue(server: Running) -> None:
    chunks = stream(server, prompt="abc", logprobs=0, max_tokens=5)
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3, 4]


def test_echo_with_streamed_logprobs_counts_the_prompt(server: Running) -> None:
    chunks = stream(server, prompt="abc", echo=True, logprobs=0, max_tokens=4)
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == list(range(7))


def test_prompt_logprobs_follow_vllm(server: Running) -> None:
    found = server.post("/v1/completions", prompt="ab", prompt_logprobs=1, max_tokens=1).json()["choices"][0]
    first, second = found["prompt_logprobs"]
    assert first is None
    assert list(second.values()) == [{"logprob": -0.5, "rank": 1, "decoded_token": "b"}]


def test_stream_equals_whole_answer(server: Running) -> None:
    chunks = stream(server, prompt=["abc", "xy"], n=2, max_tokens=7, stream_options={"include_usage": True})
    gathered = {index: "" for index in range(4)}
    ends = {}
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        gathered[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            ends[choice["index"]] = chunk["distribution"]
    whole = server.post("/v1/completions", prompt=["abc", "xy"], n=2, max_tokens=7).json()
    assert list(gathered.values()) == texts(whole)
    assert ends == dict.fromkeys(range(4), "target")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_stream_without_usage_has_none(server: Running) -> None:
    assert all("usage" not in chunk for chunk in stream(server, prompt="a", max_tokens=4))


def test_speculation_statistics_on_request(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="ab", n=2, max_tokens=8, include_speculation_stats=True).json()
    assert answer["usage"]["speculation"] == {
        "target_calls": 10,
        "drafts": 8,
        "drafted": 16,
        "accepted": 8,
        "rejections": 0,
        "mean_acceptance_length": 2.0,
        "accepted_by_drafter": {"fake": 8},
        "model_calls": {"fake": 10},
        "tokens_by_source": {"bonus": 8, "fake": 8},
        "ttft": 0.25,
        "e2e": 0.5,
    }


def test_token_ids_and_sources_only_when_asked(server: Running) -> None:
    plain = server.post("/v1/completions", prompt="ab", max_tokens=2).json()["choices"][0]
    assert not {"token_ids", "prompt_token_ids", "sources"} & set(plain)
    asked: dict[str, Any] = {"return_token_ids": True, "return_sources": True}
    choice = server.post("/v1/completions", prompt="ab", max_tokens=3, **asked).json()["choices"][0]
    assert choice["sources"] == ["fake", "bonus", "fake"]
    assert choice["token_ids"] == [*choice["prompt_token_ids"], choice["prompt_token_ids"][0]]
    chunks = stream(server, prompt="ab", max_tokens=3, **asked)
    assert [s for chunk in chunks for s in chunk["choices"][0]["sources"]] == choice["sources"]


def test_openai_bookkeeping_is_ignored(server: Running) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "suffix": None}
    assert server.post("/v1/completions", prompt="a", max_tokens=1, **harmless).status_code == 200


def test_every_sampling_key_is_taken(server: Running) -> None:
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": 1}, "seed": 7, "stop": ["@", "#"],
        "stop_token_ids": [3], "include_stop_str_in_output": True, "skip_special_tokens": False, "ignore_eos": True,
        "min_tokens": 1, "max_tokens": 2, "priority": 0,
        "speculation": {"enabled": True, "length": 3, "acceptance_method": "match"},
    }  # fmt: skip
    response = server.post("/v1/completions", prompt="a", **body)
    assert response.status_code == 200, response.text


def test_offsets_do_not_wait_for_text_that_is_held_back(tokenizer_folder: Path) -> None:
    tokens = TextTokenizer(tokenizer_of(str(tokenizer_folder)), 256, 300)
    body = CompletionBody(prompt=[[1]], logprobs=0)
    (request,) = make_requests("r", (1,), SamplingParams(logprobs=0))
    shape, output, offsets = CompletionShape(body, tokens), Output("", request), []
    for text, ids in (("", tokens.encode("ab")), ("abc", tokens.encode("c"))):
        entries = tuple(TokenLogprobs(id, -0.5, 1, ()) for id in ids)
        event = Event("r-0", "r", 0, text, ids, ("target",) * len(ids), entries)
        for choice in shape.chunks(0, output, event):
            offsets += choice["logprobs"]["text_offset"]
        output.take(event)
    assert offsets == [0, 1, 2]


def test_prompts_of_several_choices_are_scored_once(server: Running) -> None:
    body = {"prompt": ["ab", "cd"], "prompt_logprobs": 1, "max_tokens": 1, "n": 2}
    choices = server.post("/v1/completions", **body).json()["choices"]
    assert ["prompt_logprobs" in choice for choice in choices] == [True, False, True, False]


def test_echoed_log_probabilities_of_several_choices_are_bounded(server: Running) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1, "n": 2}
    choices = server.post("/v1/completions", **body).json()["choices"]
    assert [choice["logprobs"]["tokens"][:3] for choice in choices] == [["a", "b", "c"]] * 2
    answer = server.post("/v1/completions", **body | {"prompt": ["a" * 150] * 2, "n": 60})
    assert answer.status_code == 400 and "16384 tokens in the prompts" in answer.json()["error"]["message"]


def test_numbers_of_choices_with_thousands_of_digits_are_refused(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=["a"] * 2, n=int("9" * 4000), max_tokens=1)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"


def test_long_lists_are_written_outside_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, list[int]] = {"whole": [], "chunk": []}
    for name, found in threads.items():
        kept = getattr(responses, name)

        def recorded(*given: Any, kept: Any = kept, found: list[int] = found) -> Any:
            found.append(threading.get_ident())
            return kept(*given)

        monkeypatch.setattr(responses, name, recorded)
    loop, long = server.run(threading.get_ident), "abcdefgh" * 25
    for more in ({"logprobs": 20, "max_tokens": 30}, {"prompt_logprobs": 5}, {"return_token_ids": True, "n": 3}):
        server.post("/v1/completions", prompt=long, **more)
    assert len(threads["whole"]) == 3 and loop not in threads["whole"]
    server.post("/v1/completions", prompt="abc", max_tokens=2)
    assert threads["whole"][-1] == loop, "a thread would take longer than a short answer"
    stream(server, prompt=long, prompt_logprobs=5, max_tokens=4)
    assert threads["chunk"][0] != loop and threads["chunk"][-1] == loop


def test_log_probabilities_of_one_answer_come_in_several_events(server: Running) -> None:
    """The event loop reads each event at once, so one event with all log-probabilities would stop the loop."""
    body = CompletionBody(prompt="abc", logprobs=5)
    tokens = TextTokenizer(None, 256, 300)
    made = Service(server.client, tokens, ServerMetrics("m"), ServerSettings()).call(
        "cmpl", body, [("", (1, 2))], body.sampling()
    )
    assert [request.streams for request in made.requests] == [True]


def test_the_text_of_a_token_is_read_once(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, asked = TextTokenizer(tokenizer_of(str(tokenizer_folder)), 256, 300), list[int]()
    kept = TextTokenizer.piece

    def piece(self: TextTokenizer, id: int) -> str:
        asked.append(id)
        return kept(self, id)

    monkeypatch.setattr(TextTokenizer, "piece", piece)
    entries = [TokenLogprobs(id, -0.5, 1, tuple((other, -1.0) for other in range(20))) for id in range(10)] * 30
    msgspec.json.encode([logprobs.chat(entries, 20, tokens), logprobs.prompt(entries, tokens)])
    assert sorted(asked) == list(range(20))
