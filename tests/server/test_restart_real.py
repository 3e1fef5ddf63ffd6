"""A killed process of the real engine: streams go on, under ``match`` with text and figures of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.crashes import ask, during, engine_of, figures, health
from server.served import Served

ZOO = Path(str(__import__("cospec").__file__)).parent / "zoo" / "target"
pytestmark = pytest.mark.skipif(not (ZOO / "config.json").exists(), reason="the zoo's weights are not installed")

STREAM = {"stream": True, "stream_options": {"include_usage": True}, "include_speculation_stats": True}
STREAM |= {"return_sources": True, "max_tokens": 120, "ignore_eos": True}
MATCH = (
    {"prompt": "It was a dark night, and", "temperature": 0, "logprobs": 2},
    {"prompt": "def read_lines(path):\n", "seed": 4, "temperature": 0.9, "frequency_penalty": 0.6, "min_tokens": 100},
    {"prompt": "It was a dark night, and", "seed": 5, "top_p": 0.9, "presence_penalty": 0.5, "stop": ["zebra zebra"]},
    {
        "prompt": "2 + 3 =",
        "seed": 6,
        "speculation": {"enabled": False},
        "repetition_penalty": 1.2,
        "prompt_logprobs": 1,
    },
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    drafts = '{"method": "draft_model", "model": "zoo:drafter", "num_speculative_tokens": 3}'
    started = Served("zoo", "--speculative-config", drafts)
    yield started
    assert started.stop() == 0


def test_streams_go_on_after_a_crash(server: Served) -> None:
    bodies = [{**STREAM, **body} for body in MATCH]
    undisturbed = during(server.url, bodies, lambda: None)

    def strike() -> None:
        os.kill(engine_of(server.process.pid), signal.SIGKILL)
        health(server.http, 503)

    *replayed, sampled = during(server.url, [*bodies, {**STREAM, "prompt": "It was"}], strike)
    for answer, whole in zip(replayed, undisturbed, strict=True):
        assert (answer.status, answer.error) == (200, None)
        assert (answer.text, answer.finish) == (whole.text, whole.finish)
        assert answer.tokens == whole.tokens
        assert answer.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        assert answer.usage["completion_tokens"] == whole.usage["completion_tokens"] == len(answer.sources)
        assert sum(answer.usage["speculation"]["tokens_by_source"].values()) == len(answer.sources)
        assert answer.usage["speculation"]["e2e"] > answer.usage["speculation"]["ttft"]
    assert (sampled.status, sampled.error, sampled.finish[0]) == (200, None, "length")
    assert sampled.usage["completion_tokens"] == STREAM["max_tokens"] == len(sampled.sources)
    health(server.http, 200)
    assert figures(server.http)["cospec:requests_replayed_total"] == len(MATCH) + 1
    assert ask(server.url, {"prompt": "It was", "max_tokens": 2}).status == 200
