"""A plug-in that is installed works in the engine's process of a server without a further option."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.plugin import install
from server.served import Served
from server.test_real_engine import needs_zoo

SPECULATION = {
    "method": "phrases",
    "policy": "two-lengths",
    "policy_options": {"first": 3},
    "acceptance_method": "threshold",
    "num_speculative_tokens": 3,
}


@needs_zoo
def test_an_installed_plugin_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = install(tmp_path / "installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    server = Served("zoo", "--speculative-config", json.dumps(SPECULATION), "--threads", "1")
    try:
        body = {"prompt": "One, two, one, two, one,", "max_tokens": 20, "include_speculation_stats": True}
        answer = server.http.post("/v1/completions", json={**body, "temperature": 0}).json()
        assert answer["usage"]["speculation"]["drafted"] > 0, answer
        assert (answer["distribution"], answer["exact"]) == ("threshold(target)", False)
        other = {**body, "speculation": {"acceptance_method": "match"}}
        assert server.http.post("/v1/completions", json=other).json()["distribution"] == "target"
    finally:
        server.stop()
