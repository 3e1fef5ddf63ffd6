"""Ray's head restarts under a running request: with its state in Redis, requests go on."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from benchmarks.chaos import ENGINE, PROMPTS, Ask, expect
from benchmarks.cluster_process import ClusterProcess

from harness.completions import figure
from harness.waiting import until

pytest.importorskip("ray", reason="the extra cluster is not installed")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(150),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
]

PATIENCE = 8.0  # seconds without the head


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """The address of an empty Redis."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    with (tmp_path / "redis.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log)
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


def heads(cluster: ClusterProcess) -> set[int]:
    """Process ids of Ray's head."""
    return {pid for pid, command in cluster.below().items() if "gcs_server" in command.split()[0]}


def await_another(cluster: ClusterProcess, head: int) -> None:
    until(lambda: len(heads(cluster) - {head}) == 1, "a new head")


def ask(cluster: ClusterProcess, wanted: Ask) -> str:
    body = {"prompt": wanted.prompt, **wanted.sampling}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=90)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_requests_go_on_while_the_head_restarts(redis: str, tmp_path: Path) -> None:
    config = {
        "name": f"head-{os.getpid()}",
        "server": {"port": 0},
        "machine": {"num_cpus": 2},
        "health": {"period": 1, "timeout": 3, "grace": 1, "head": PATIENCE},
        "target": {"engine": ENGINE},
    }
    asks = [Ask(prompt, None) for prompt in PROMPTS]
    wanted = [text for _, text in expect(asks).values()]
    with ClusterProcess(config, tmp_path, {"RAY_REDIS_ADDRESS": redis}) as cluster:
        assert ask(cluster, asks[0]) == wanted[0]
        for _ in range(2):
            (head,) = heads(cluster)
            body = {"prompt": PROMPTS[1], "stream": True, "temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
            with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=90) as answer:
                lines = answer.iter_lines()
                next(lines)
                os.kill(head, signal.SIGKILL)
                assert [line for line in lines if line][-1] == "data: [DONE]", "the running request"
            assert [ask(cluster, each) for each in asks] == wanted, "requests after the restart"
            await_another(cluster, head)
            found = cluster.status()  # the command asks the head for the machines
            assert [each["alive"] for each in found["machines"]] == [True]
            assert {each["status"] for each in found["deployments"].values()} == {"HEALTHY"}
        assert cluster.log.count("Ray's head ended, and was started again") == 2
        until(lambda: figure(cluster, "ray_head_restarts_total") == 2, "the metric")
        until(lambda: figure(cluster, "engine_up") == 1, "reports of the replica")
        assert figure(cluster, "replicas_lost_total") == 0
        assert cluster.process.poll() is None
    assert not cluster.left()
