"""Requests to the API server of a cluster."""

from __future__ import annotations

from typing import Any

import httpx
from benchmarks.chaos import Ask
from benchmarks.cluster_process import ClusterProcess

# One client for all requests, because a client reads certificates for 30 ms; no connection is kept for a later cluster.
CLIENT = httpx.Client(verify=False, timeout=90, limits=httpx.Limits(max_keepalive_connections=0))


def complete(cluster: ClusterProcess, ask: Ask, **more: Any) -> tuple[list[int], str]:
    """Return the token ids and the text of a completion."""
    body = {"prompt": ask.prompt, "return_token_ids": True, **ask.sampling, **more}
    answer = CLIENT.post(f"{cluster.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["text"]


def figure(cluster: ClusterProcess, name: str, labels: str = "") -> float:
    """Return the sum of a metric over its labels, or over those that begin with ``labels``."""
    text = CLIENT.get(f"{cluster.url}/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"cospec:{name}{{{labels}"))
