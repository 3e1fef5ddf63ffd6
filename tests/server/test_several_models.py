"""Ensembles over HTTP: the model list, ensembles of requests, streams, and bad ensembles that harm no other request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.served import Served, write_llama

LAW = {"method": "weighted", "weights": [0.6, 0.4]}
PLUGIN = """
import cospec
import torch


def asserts(logits):
    assert False, "no\\nnumbers"


cospec.register_blend("second", lambda logits: logits[1])
cospec.register_blend("nan", lambda logits: logits[0] * torch.nan)
cospec.register_blend("asserts", asserts)
cospec.register_blend("late", lambda logits: open("no-such-file"))
cospec.register_blend("text", lambda logits: "logits")
"""
BAD = [
    ({"method": "weighted", "lambda": 1.5}, "ensemble.lambda is 1.5"),
    ({"method": "weighted", "lambda": -0.1}, "ensemble.lambda is -0.1"),
    ({"method": "weighted", "lambda": "half"}, "ensemble.lambda is 'half'"),
    ({"method": "weighted", "lambda": float("nan")}, "ensemble.lambda is nan"),
    ({"method": "weighted", "weights": [0.6, 0.6]}, "whose sum is 1.2"),
    ({"method": "weighted", "weights": [0.2, 0.3, 0.5]}, "allowed is one weight for each of the 2 models"),
    ({"method": "weighted", "weights": [1.2, -0.2]}, "ensemble.weights is [1.2, -0.2]"),
    ({"method": "weighted", "weights": [0.5, None]}, "ensemble.weights[1] is None"),
    ({"method": "weighted", "lambda": 0.5, "weights": [0.5, 0.5]}, "left out when ensemble.weights is given"),
    ({"method": "weighted", "mu": 0.5}, "key ensemble.mu is 0.5"),
    ({"method": "contrastive", "mu": -1}, "ensemble.mu is -1"),
    ({"method": "contrastive", "plausibility": 2}, "ensemble.plausibility is 2"),
    ({"method": "adaptive", "max_divergence": 2}, "ensemble.max_divergence is 2"),
    ({"method": "realign", "weights": [3, 3]}, "whose sum is 6"),
    ({"method": "realign", "lambda": 1e30}, "ensemble.lambda is 1e+30"),
    ({"method": "weighted", "weights": [1e308, 1e308]}, "ensemble.weights is [1e+308, 1e+308]"),
    ({"method": "realign", "weights": [1e308, 1e308]}, "ensemble.weights is [1e+308, 1e+308]"),
    ({"method": "realign", "weights": [float("inf"), -float("inf")]}, "ensemble.weights[0] is inf"),
    ({"method": "single", "x": 1}, "key ensemble.x is 1"),
    ({"method": "second", "mu": 1}, "key ensemble.mu is 1"),
    ({"method": "no-such-blend"}, "ensemble.method is 'no-such-blend'"),
    ({"method": ["weighted"]}, "ensemble.method is ['weighted']"),
    ({}, "ensemble.method is missing"),
    ("weighted", "ensemble is 'weighted'"),
    ({"method": "nan"}, "ensemble nan is not numbers at this prompt"),
    ({"method": "asserts"}, "ensemble asserts is a function that raised AssertionError: no numbers"),
    ({"method": "late"}, "ensemble late is a function that raised FileNotFoundError"),
    ({"method": "text"}, "ensemble text is a function that returned a str"),
]  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("several")
    write_llama(folder / "one", 0)
    write_llama(folder / "two", 1)
    (folder / "blend_plugin.py").write_text(PLUGIN)
    models = ["--model", "one", "--model", "two", "--ensemble", json.dumps(LAW)]
    server = Served(*models, "--plugin", "blend_plugin", "--threads", "1", name=None, folder=folder)
    yield server
    assert server.stop() == 0


BODY = {"prompt": "abcab", "max_tokens": 24, "seed": 3, "ignore_eos": True, "include_speculation_stats": True}


def test_they_are_listed_as_one_model(served: Served) -> None:
    (only,) = served.http.get("/v1/models").json()["data"]
    assert only["id"] == "one+two"
    answer = served.http.post("/v1/completions", json={**BODY, "model": only["id"]}).json()
    assert answer["distribution"] == "weighted(0.6, 0.4)"
    assert set(answer["usage"]["speculation"]["model_calls"]) == {"one", "two"}
    refused = served.http.post("/v1/completions", json={**BODY, "model": "one"})
    assert refused.status_code == 404


@pytest.mark.parametrize(
    ("ensemble", "name"),
    [
        ({"method": "weighted", "lambda": 0.3}, "weighted(0.7, 0.3)"),
        ({"method": "contrastive", "mu": 0.5, "plausibility": 0.1}, "contrastive(mu=0.5, plausibility=0.1)"),
        ({"method": "realign", "lambda": 1.5}, "realign(-0.5, 1.5)"),
        ({"method": "adaptive", "max_divergence": 0.4}, "adaptive(max_divergence=0.4)"),
        ({"method": "single"}, "target"),
        ({"method": "second"}, "second"),
    ],
)
def test_a_request_brings_an_ensemble(served: Served, ensemble: dict[str, Any], name: str) -> None:
    """The same whole, streamed, as a chat, and without proposals."""
    body = {**BODY, "ensemble": ensemble, "frequency_penalty": 0.5, "top_p": 0.9}
    whole = served.http.post("/v1/completions", json=body).json()
    assert (whole["distribution"], whole["exact"]) == (name, not name.startswith("adaptive"))
    assert (whole["divergence"] is None) == whole["exact"]
    assert whole["exact"] or 0 < whole["divergence"] <= 0.4
    quiet = served.http.post("/v1/completions", json={**body, "speculation": {"enabled": False}}).json()
    assert quiet["choices"][0]["text"] == whole["choices"][0]["text"]
    lines = served.http.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert {(end["distribution"], end["exact"]) for end in chunks if "distribution" in end} == {(name, whole["exact"])}
    messages = [{"role": "user", "content": "abc"}]
    assert (
        served.http.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 3, "ensemble": ensemble}
        ).json()["distribution"]
        == name
    )


def test_bad_ensembles_harm_no_other_request(served: Served) -> None:
    alone = served.http.post("/v1/completions", json={**BODY, "max_tokens": 90}).json()["choices"]

    def ask(ensemble: object) -> str:
        data = json.dumps({"prompt": "abc", "max_tokens": 9, "ensemble": ensemble})
        answer = served.http.post("/v1/completions", content=data)
        assert answer.status_code in (400, 500)
        said = answer.json()["error"]["message"]
        assert "\n" not in said
        return str(said)

    with ThreadPoolExecutor(4) as pool:
        neighbours = [
            pool.submit(served.http.post, "/v1/completions", json={**BODY, "max_tokens": 90}) for _ in range(9)
        ]
        for ensemble, says in BAD:
            assert says in ask(ensemble), ensemble
        for neighbour in neighbours:
            assert neighbour.result().status_code == 200
            assert neighbour.result().json()["choices"] == alone


def test_ensembles_that_requests_may_not_bring(tmp_path: Path) -> None:
    write_llama(tmp_path / "one", 0)
    write_llama(tmp_path / "two", 1)
    models = ["--model", "one", "--model", "two", "--ensemble", json.dumps(LAW), "--threads", "1"]
    server = Served(*models, "--collaboration", '{"request_ensembles": false}', folder=tmp_path)
    refused = server.http.post("/v1/completions", json={**BODY, "ensemble": {"method": "single"}})
    allowed = server.http.post("/v1/completions", json=BODY)
    assert server.stop() == 0
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "ensemble"
    assert allowed.json()["distribution"] == "weighted(0.6, 0.4)"
