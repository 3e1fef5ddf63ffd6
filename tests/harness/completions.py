"""Requests to the API server of a cluster."""

from __future__ import annotations

from typing import Any

import httpx
from benchmarks.chaos import Ask
from benchmarks.cluster_process import ClusterProcess


def complete(cluster: ClusterProcess, ask: Ask, **more: Any) -> tuple[list[int], str]:
    """Return the token ids and the text of a completion."""
    body = {"prompt": ask.prompt, "return_token_ids": True, **ask.sampling, **more}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=90)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["text"]


def figure(cluster: ClusterProcess, name: str) -> float:
    """Return the sum of a metric over its labels."""
    text = httpx.get(f"{cluster.url}/metrics", timeout=30).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"cospec:{name}{{"))
