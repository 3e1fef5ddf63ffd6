"""``cospec node``: keys, refusals, and the table of a server's nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cospec.cli.main import app

pytest.importorskip("zmq")
NODE = {
    **{"node": "small", "drafter": "code", "state": "ready", "weight": None, "draft_acceptance_rate": 0.75},
    **{"latency_seconds": 0.0042, "load_seconds": 0.0, "drafts": 12, "late": 1, "lost": 0, "cost_per_hour": 0.25},
}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["node", *arguments])
    return result.exit_code, result.stdout + result.stderr


def test_keys(tmp_path: Path) -> None:
    code, output = run("keys", str(tmp_path / "keys"), "--name", "small")
    assert code == 0 and "small.key_secret: keep secret" in output
    assert (tmp_path / "keys" / "nodes" / "small.key").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["join", "tcp://10.0.0.1:5710"], "address is tcp://10.0.0.1:5710 without keys"),
        (["join", "tcp://127.0.0.1:5710", "--drafter", "{"], "drafter is"),
        (["join", "tcp://127.0.0.1:5710", "--drafter", "heads"], "drafter: method is 'heads'"),
        (["status", "http://127.0.0.1:9"], "url is http://127.0.0.1:9"),
    ],
)
def test_wrong_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    code, output = run(*arguments)
    assert code == 1 and sentence in output


@pytest.mark.parametrize("nodes", [[], [NODE]])
def test_status(nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, **given: Any) -> httpx.Response:
        assert url == "http://server/cluster" and given["headers"] == {"Authorization": "Bearer secret"}
        return httpx.Response(200, json={"nodes": nodes}, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    code, output = run("status", "http://server/", "--api-key", "secret")
    assert code == 0
    assert ("small" in output and "0.75" in output and "4.2" in output) if nodes else "No drafter node" in output
    _, output = run("status", "http://server", "--json", "--api-key", "secret")
    assert json.loads(output) == {"nodes": nodes}
