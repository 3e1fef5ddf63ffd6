"""The whole stack with the real engine: a small random Llama always, the zoo where it was installed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cospec.models.files.gguf_writer import write_gguf
from cospec.models.files.weight_source_selection import open_source
from server.served import Served, write_llama

ZOO = Path(str(__import__("cospec").__file__)).parent / "zoo" / "target"
needs_zoo = pytest.mark.skipif(not (ZOO / "config.json").exists(), reason="the zoo's weights are not installed")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def served(model_folder: Path) -> Iterator[Served]:
    speculation = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    server = Served(str(model_folder), "--speculative-config", speculation, "--threads", "1", "--dtype", "float32")
    yield server
    assert server.stop() == 0


def test_answers_are_repeatable_and_independent_of_speculation(served: Served) -> None:
    body = {"prompt": "abcabcabc", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    drafted = {**body, "include_speculation_stats": True}
    first = served.http.post("/v1/completions", json=drafted).json()
    plain = served.http.post("/v1/completions", json={**body, "speculation": {"enabled": False}}).json()
    assert first["choices"][0]["text"] == plain["choices"][0]["text"]
    assert first["distribution"] == "target"
    assert first["usage"]["completion_tokens"] == 24
    assert first["usage"]["speculation"]["drafts"] > 0


def test_stream_equals_whole_answer(served: Served) -> None:
    body = {"model": "m", "prompt": ["abab", "xyz"], "max_tokens": 12, "seed": 3, "n": 2, "logprobs": 2}
    whole = served.openai.completions.create(**body)
    texts = [""] * 4
    logprobs: list[list[float]] = [[], [], [], []]
    for chunk in served.openai.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    for choice, streamed in zip(whole.choices, logprobs, strict=True):
        assert streamed == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)


def test_chat_and_scoring(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=4, logprobs=True, top_logprobs=3
    )
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    scored = served.openai.completions.create(model="m", prompt="hello", echo=True, max_tokens=0, logprobs=1)
    assert scored.choices[0].text == "hello"
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in scored.choices[0].logprobs.token_logprobs[1:])


def test_scoring_does_not_depend_on_the_prefix_cache(served: Served) -> None:
    body: dict[str, Any] = {
        "prompt": "the same long prompt, twice over, longer than a page",
        "echo": True,
        "max_tokens": 0,
        "logprobs": 0,
    }
    first, second = (served.http.post("/v1/completions", json=body).json()["choices"][0] for _ in range(2))
    assert len(first["logprobs"]["token_logprobs"]) == len(body["prompt"])
    assert second["logprobs"]["token_logprobs"][1:] == pytest.approx(first["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_extreme_numbers_are_served_or_refused(served: Served) -> None:
    for extreme in (
        {"top_k": 2**62},
        {"max_tokens": 2**62},
        {"min_tokens": 2**40, "max_tokens": 2**41},
        {"seed": 2**64 - 1},
    ):
        body = {"prompt": "a", "max_tokens": 2, "temperature": 0.7, **extreme}
        assert served.http.post("/v1/completions", json=body).status_code in (200, 400), extreme


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_longer_than_the_context_ends_with_length(served: Served, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"prompt": "ab", "max_tokens": 100_000, "ignore_eos": True, "stream": stream, **options}
    found = served.http.post("/v1/completions", json=body)
    if stream:
        chunks = [json.loads(line[6:]) for line in found.text.split("\n\n") if line[:7] == "data: {"]
        reasons, usage = [choice["finish_reason"] for each in chunks for choice in each["choices"]], chunks[-1]["usage"]
    else:
        reasons, usage = [found.json()["choices"][0]["finish_reason"]], found.json()["usage"]
    assert reasons[-1] == "length"
    assert usage["total_tokens"] == 128


def test_going_away_frees_the_cache(served: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 100, "n": 8, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    end = time.monotonic() + 30
    while 'cospec:num_requests_running{model_name="m"} 0.0' not in served.http.get("/metrics").text:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_refusals_come_from_the_engine_too(served: Served) -> None:
    bodies: list[dict[str, Any]] = [
        {"speculation": {"acceptance_method": "guess"}},
        {"logit_bias": {"999": 1}},
        {"prompt": "x" * 200},
        {"logits_processors": {"guess": {}}},
        {"logits_processors": {"penalties": {}}},
    ]
    for body in bodies:
        response = served.http.post("/v1/completions", json={"prompt": "a", **body})
        assert response.status_code == 400, response.text
    assert served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_excluded_tokens_do_not_occur(served: Served) -> None:
    body = {
        "prompt": "abc",
        "max_tokens": 30,
        "temperature": 1.5,
        "seed": 2,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    few = {**body, "allowed_token_ids": [3, 4, 5], "bad_words_token_ids": [[3, 4], [5, 5]]}
    ids = served.http.post("/v1/completions", json=few).json()["choices"][0]["token_ids"]
    assert set(ids) == {3, 4, 5}
    assert not {(3, 4), (5, 5)} & set(itertools.pairwise(ids))
    plain = served.http.post("/v1/completions", json={**few, "speculation": {"enabled": False}}).json()
    assert plain["choices"][0]["token_ids"] == ids


def test_metrics_count(served: Served) -> None:
    served.http.post(
        "/v1/completions", json={"prompt": "ababab" * 5, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    )
    text = served.http.get("/metrics").text
    assert 'cospec:spec_decode_num_drafts_total{drafter="ngram"' in text
    assert 'finished_reason="length"' in text


def test_generate_command(model_folder: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text('{"id": 1, "prompt": "abab"}\n{"id": 2, "turns": ["a", "b"]}\n{"id": 3, "prompt": ""}\n')
    command = [
        sys.executable, "-m", "cospec", "generate", "--model", str(model_folder), "--prompts", str(prompts),
        "--output", str(output), "--max-tokens", "5", "--temperature", "0", "--threads", "1",
        "--speculative-config", '{"method": "ngram"}',
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "line 3: prompt is ''" in done.stderr
    rows = {row["id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert set(rows) == {1, 2}
    assert len(rows[2]["answers"]) == 2


@needs_zoo
def test_zoo_serves_with_its_drafter() -> None:
    """On two threads."""
    server = Served("zoo", "--max-num-seqs", "4", "--strict", "--threads", "2")
    try:
        refused = server.http.post("/v1/completions", json={"prompt": "a", "colour": "red"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "colour")
        body = {"prompt": "def read_lines(path):\n", "max_tokens": 24, "temperature": 0}
        body |= {"include_speculation_stats": True, "return_sources": True}
        body |= {"speculation": {"length": 4}}  # one of the policy's choice may be 0 on a busy machine
        answer = server.http.post("/v1/completions", json=body).json()
        assert answer["usage"]["speculation"]["accepted"] > 0
        assert set(answer["choices"][0]["sources"]) - {"target", "bonus"}
    finally:
        assert server.stop() == 0


@needs_zoo
@pytest.mark.parametrize(("kind", "drafter"), [("q4_0", "q8_0"), ("gguf", "q4_0")])
def test_drafts_change_no_token_of_a_quantized_target(tmp_path: Path, kind: str, drafter: str) -> None:
    target = ["zoo", "--quantization", kind]
    if kind == "gguf":
        write_gguf(tmp_path / "zoo.gguf", ZOO, open_source(ZOO), "q8_0")
        target = [str(tmp_path / "zoo.gguf")]
    drafts = {"method": "draft_model", "model": "zoo:drafter", "quantization": drafter, "num_speculative_tokens": 4}
    server = Served(*target, "--speculative-config", json.dumps(drafts), "--threads", "1")
    prompts = ["It was a dark night, and", "def add(first, second):\n", "Question: Tom has 12 apples"]
    common = {"prompt": prompts, "max_tokens": 24, "return_token_ids": True, "include_speculation_stats": True}
    try:
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 5, "n": 2}):
            found = []
            for enabled in (True, False):
                body = {**common, **sampling, "speculation": {"enabled": enabled}}
                found.append(server.http.post("/v1/completions", json=body).json())
            drafted, plain = ([choice["token_ids"] for choice in answer["choices"]] for answer in found)
            assert drafted == plain and len(drafted) == 3 * int(sampling.get("n", 1))
            assert found[0]["usage"]["speculation"]["accepted"] > 0
    finally:
        assert server.stop() == 0
