"""An engine process that dies or freezes is replaced, and its requests go on."""

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
from server.crashes import Answer, ask, during, engine_of, figures, health
from server.fake_server import FakeServed

Start = Callable[..., FakeServed]
LONG = {"prompt": "SLOW words ", "max_tokens": 200, "logprobs": 1, "return_sources": True}
LONG |= {"include_speculation_stats": True}
LOSE = {"prompt": "LOSE", "max_tokens": 5, "logprobs": 1}
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


def test_a_killed_engine_is_replaced_and_requests_go_on(start: Start) -> None:
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

    replayed = during(server.url, bodies, strike)
    assert [(response.status_code, "retry-after" in response.headers) for response in seen] == [(503, True)] * 3
    for answer in replayed:
        assert answer.error is None
        assert (answer.text, answer.finish) == (undisturbed.text, undisturbed.finish)
        assert (answer.tokens, answer.logprobs) == (undisturbed.tokens, undisturbed.logprobs)
        assert answer.sources == undisturbed.sources
        assert answer.usage["completion_tokens"] == 200
        counts = answer.usage["speculation"]["tokens_by_source"]
        assert counts == {name: answer.sources.count(name) for name in ("fake", "bonus")}
    health(server.http, 200)
    assert ask(server.url, {"prompt": "ab", "max_tokens": 4}).text == "abab"
    found = figures(server.http)
    assert (found["cospec:engine_up"], found["cospec:engine_restarts_total"]) == (1, 1)
    assert found["cospec:requests_replayed_total"] == len(bodies)


def test_a_request_that_kills_twice_ends_alone(start: Start) -> None:
    """The other requests were in both crashes of engine processes too, and go on."""
    server, ended = start(), list[Answer]()
    undisturbed = ask(server.url, LONG)
    bodies = [LONG, {**LONG, **STREAM}, {**LONG, "temperature": 0}]
    others = during(server.url, bodies, lambda: ended.append(ask(server.url, {"prompt": "DIE"})))
    (killer,) = ended
    assert (killer.status, killer.error is not None and "exit code 3" in killer.error["message"]) == (503, True)
    assert [(answer.text, answer.error) for answer in others] == [(undisturbed.text, None)] * 3
    health(server.http, 200)
    assert ask(server.url, {"prompt": "ab", "max_tokens": 4}).text == "abab"
    found = figures(server.http)
    assert found["cospec:engine_restarts_total"] == 2
    assert found["cospec:requests_replayed_total"] == 4 + 3  # the killer returned last; the others returned again


def test_a_stream_that_was_in_two_crashes_ends_with_an_error(start: Start) -> None:
    server = start()

    def strike() -> None:
        for restarts in range(2):
            assert figures(server.http)["cospec:engine_restarts_total"] == restarts
            os.kill(engine_of(server.process.pid), signal.SIGKILL)
            health(server.http, 503)
            health(server.http, 200)

    (answer,) = during(server.url, [{"prompt": "FOREVER", **STREAM}], strike)
    assert answer.status == 200 and answer.text and ("FOREVER" * 1000).startswith(answer.text)
    assert answer.error is not None and answer.error["type"] == "service_unavailable"
    assert "ended by signal 9" in answer.error["message"]


def test_a_request_that_kills_late_ends_too(start: Start) -> None:
    """The second crash is blamed on the request that returned last, the third on all that returned."""
    server = start()
    bodies: list[dict[str, Any]] = [{"prompt": "FALL FOREVER"}, *[{**LONG, **STREAM}] * 8]
    killer, *others = during(server.url, bodies, lambda: None)
    assert killer.error is not None
    assert sum(answer.error is None for answer in others) == 8 - 3
    health(server.http, 200)
    assert figures(server.http)["cospec:engine_restarts_total"] == 3


def test_an_engine_that_cannot_compute_any_more_is_replaced(start: Start) -> None:
    server = start()
    body, lost = {**LONG, **STREAM, "temperature": 0}, []
    undisturbed = ask(server.url, body)
    (answer,) = during(server.url, [body], lambda: lost.append(ask(server.url, {**STREAM, **LOSE})))
    assert (answer.text, answer.finish) == (undisturbed.text, undisturbed.finish)
    assert [(each.error, each.text) for each in lost] == [(None, "LOSEL")]
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
