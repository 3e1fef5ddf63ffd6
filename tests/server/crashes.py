"""Requests under way while the engine process of a server dies, and what became of them."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


@dataclass
class Answer:
    """One choice, streamed or whole."""

    status: int
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    finish: tuple[Any, Any] = (None, None)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    def take(self, chunk: dict[str, Any]) -> None:
        """Add a chunk, or a whole answer."""
        self.error = chunk.get("error", self.error)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            self.text += choice["text"]
            rows = choice["logprobs"] or {"token_logprobs": [], "tokens": []}
            self.logprobs += rows["token_logprobs"]
            self.tokens += rows["tokens"]
            self.sources += choice.get("sources", ())
            if choice["finish_reason"] is not None:
                self.finish = (choice["finish_reason"], choice["stop_reason"])


def ask(url: str, body: dict[str, Any], begun: threading.Event | None = None) -> Answer:
    """Send a completion; ``begun`` is set when its answer has begun, which may be an error."""
    begun = begun or threading.Event()
    if not body.get("stream"):
        begun.set()
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        answer = Answer(response.status_code)
        answer.take(response.json())
        return answer
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        answer = Answer(response.status_code)
        for line in response.iter_lines():
            if line.startswith(("data: {", "{")):
                answer.take(json.loads(line.removeprefix("data: ")))
                begun.set()
    return answer


def during(url: str, bodies: Sequence[dict[str, Any]], strike: Callable[[], None]) -> list[Answer]:
    """The answers to ``bodies`` where ``strike`` is called once the engine has all of them.

    A stream has begun when its first chunk comes. Whole answers show nothing before their end, so they are sent first,
    and the server's count of live requests shows that they were taken.
    """
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as threads, httpx.Client(base_url=url) as http:
        begun = [threading.Event() for _ in bodies]
        answers: dict[int, concurrent.futures.Future[Answer]] = {}
        whole = [place for place, body in enumerate(bodies) if not body.get("stream")]
        for place in whole:
            answers[place] = threads.submit(ask, url, bodies[place], begun[place])
        end = time.monotonic() + 5
        while figures(http)["cospec:num_requests_live"] < len(whole) and time.monotonic() < end:
            time.sleep(0.01)
        for place in range(len(bodies)):
            if place not in answers:
                answers[place] = threads.submit(ask, url, bodies[place], begun[place])
        for event in begun:
            assert event.wait(90)  # engines of a busy machine take long to start
        strike()
        return [answers[place].result() for place in range(len(bodies))]


def engine_of(server: int) -> int:
    """Process id of a server's engine."""
    children = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    (engine,) = [pid for pid in children if b"engine_process_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return engine


def health(http: httpx.Client, until: int, seconds: float = 40.0) -> httpx.Response:
    """Ask for ``/health`` until the status is ``until``."""
    end = time.monotonic() + seconds
    while (response := http.get("/health")).status_code != until:
        assert time.monotonic() < end, f"/health never was {until}"
        time.sleep(0.02)
    return response


def figures(http: httpx.Client) -> dict[str, float]:
    """The samples of ``/metrics`` by name."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}
