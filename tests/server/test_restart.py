"""An engine process that dies or freezes is replaced; what ``match`` decides goes on, the rest ends with an error."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.waiting import until
from server.crashes import ask, during, engine_of, figures, health
from server.fake_server import FakeServed

Start = Callable[..., FakeServed]
LONG = {"prompt": "SLOW words ", "max_tokens": 200, "logprobs": 1, "return_sources": True}
LONG |= {"include_speculation_stats": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def start(tokenizer_folder: Path) -> Iterator[Start]:
    started: list[FakeServed] = []

    def one(**settings: Any) -> FakeServed:
        started.append(FakeServed(tokenizer_folder, **settings))
        return started[-1]

    yield one
    for server in started:
        server.stop()


def test_a_killed_engine_is_replaced_and_match_requests_go_on(start: Start) -> None:
    server = start()
    greedy, seeded = {**LONG, "temperature": 0}, {**LONG, "seed": 3}
    undisturbed = ask(server.url, greedy)
    sampled = {**LONG, **STREAM}
    rejection = {**seeded, **STREAM, "speculation": {"acceptance_method": "rejection"}}
    bodies = [{**greedy, **STREAM}, {**seeded, **STREAM}, seeded, sampled, rejection]
    seen: list[httpx.Response] = []

    def strike() -> None:
        assert server.http.get("/health").status_code == 200
        os.kill(engine_of(server.process.pid), signal.SIGKILL)
        seen.append(health(server.http, 503))
        seen.append(server.http.post("/v1/completions", json={"prompt": "a"}))
        seen.append(server.http.get("/ready"))

    *replayed, lost, dropped = during(server.url, bodies, strike)
    assert [(response.status_code, "retry-after" in response.headers) for response in seen] == [(503, True)] * 3
    for answer in replayed:
        assert answer.error is None
        assert (answer.text, answer.finish) == (undisturbed.text, undisturbed.finish)
        assert (answer.tokens, answer.logprobs) == (undisturbed.tokens, undisturbed.logprobs)
        assert answer.sources == undisturbed.sources
        assert answer.usage["completion_tokens"] == 200
        counts = answer.usage["speculation"]["tokens_by_source"]
        assert counts == {name: answer.sources.count(name) for name in ("fake", "bonus")}
    for answer in (lost, dropped):
        assert answer.error is not None and answer.error["type"] == "service_unavailable"
        assert "ended by signal 9" in answer.error["message"]
        assert undisturbed.text.startswith(answer.text) and len(answer.text) < 200
    health(server.http, 200)
    assert ask(server.url, {"prompt": "ab", "max_tokens": 4}).text == "abab"
    found = figures(server.http)
    assert (found["cospec:engine_up"], found["cospec:engine_restarts_total"]) == (1, 1)
    assert found["cospec:requests_replayed_total"] == 3


def test_a_request_that_kills_twice_is_not_replayed_again(start: Start) -> None:
    server = start()
    answer = ask(server.url, {"prompt": "DIE", "temperature": 0})
    assert (answer.status, answer.error is not None and "exit code 3" in answer.error["message"]) == (503, True)
    health(server.http, 200)
    assert ask(server.url, {"prompt": "ab", "max_tokens": 4}).text == "abab"
    assert figures(server.http)["cospec:engine_restarts_total"] == 2


def test_an_engine_that_cannot_compute_any_more_is_replaced(start: Start) -> None:
    """``match`` requests go on, and the request without a seed ends with the engine's sentence."""
    server = start()
    body, lost = {**LONG, **STREAM, "temperature": 0}, []
    undisturbed = ask(server.url, body)
    (answer,) = during(server.url, [body], lambda: lost.append(ask(server.url, {"prompt": "LOSE"})))
    assert (answer.text, answer.finish) == (undisturbed.text, undisturbed.finish)
    assert [(each.status, each.error and each.error["message"]) for each in lost] == [(503, "The target is lost.")]
    assert figures(server.http)["cospec:engine_restarts_total"] == 1


def test_a_process_that_cannot_start_is_no_crash_of_a_request(tokenizer_folder: Path, tmp_path: Path) -> None:
    """The request goes on in the process after."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    server = FakeServed(folder)
    try:
        body = {**LONG, **STREAM, "temperature": 0}
        undisturbed = ask(server.url, body)

        def strike() -> None:
            (folder / "tokenizer.json").rename(tmp_path / "away")
            os.kill(engine_of(server.process.pid), signal.SIGKILL)
            while figures(server.http)["cospec:engine_restarts_total"] < 2:  # the first of these has failed
                time.sleep(0.05)
            (tmp_path / "away").rename(folder / "tokenizer.json")

        (answer,) = during(server.url, [body], strike)
        assert (answer.error, answer.text) == (None, undisturbed.text)
    finally:
        server.stop()


def test_a_process_that_hangs_while_it_starts_is_replaced(tokenizer_folder: Path, tmp_path: Path) -> None:
    """The process waits for a pipe in place of a file, and the next process finds the file."""
    folder, writers = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer"), list[int]()
    server, path = FakeServed(folder, engine_timeout=2), folder / "tokenizer.json"
    try:
        body = {**LONG, **STREAM, "temperature": 0}
        undisturbed = ask(server.url, body)

        def strike() -> None:
            path.rename(tmp_path / "away")
            os.mkfifo(path)
            os.kill(engine_of(server.process.pid), signal.SIGKILL)
            until(lambda: has_reader(path, writers), "a new process reads the pipe")
            (tmp_path / "away").rename(path)

        (answer,) = during(server.url, [body], strike)
        assert (answer.error, answer.text) == (None, undisturbed.text)
        assert figures(server.http)["cospec:engine_restarts_total"] == 2
    finally:
        server.stop()
        for writer in writers:
            os.close(writer)


def has_reader(pipe: Path, writers: list[int]) -> bool:
    """Whether a process has opened a pipe to read it. The reader waits until ``writers`` are closed."""
    with contextlib.suppress(OSError):
        writers.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    return bool(writers)


def test_a_server_whose_engine_dies_again_and_again_ends(start: Start) -> None:
    server = start(max_engine_restarts=1)
    for _ in range(2):
        health(server.http, 200)
        assert ask(server.url, {"prompt": "DIE"}).status == 503
    assert server.process.wait(30) == 1
    assert server.process.stdout is not None
    said = "The engine has died 2 times in a row. The engine process has ended with exit code 3.\n"
    assert server.process.stdout.read() == said


def test_a_frozen_engine_is_reported_and_replaced(start: Start) -> None:
    server = start(engine_timeout=2)
    body = {**LONG, **STREAM, "temperature": 0}
    undisturbed = ask(server.url, body)

    def strike() -> None:
        os.kill(engine_of(server.process.pid), signal.SIGSTOP)
        early = figures(server.http)  # the engine does not answer, and is not known to be frozen yet
        assert "cospec:num_requests_running" not in early and early["cospec:num_requests_live"] == 1
        assert "no progress for 2 seconds" in health(server.http, 503).text
        assert figures(server.http)["cospec:engine_up"] == 0

    (answer,) = during(server.url, [body], strike)
    assert answer.text == undisturbed.text
    assert figures(server.http)["cospec:engine_restarts_total"] == 1


def test_an_idle_engine_is_healthy(start: Start) -> None:
    server = start(engine_timeout=2)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        assert server.http.get("/health").status_code == 200
        time.sleep(0.1)


def test_a_server_ends_on_sigterm_while_its_engine_restarts(start: Start) -> None:
    server = start()
    os.kill(engine_of(server.process.pid), signal.SIGKILL)
    health(server.http, 503)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
