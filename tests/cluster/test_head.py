"""Ray's head is killed and started again from its stored state: requests go on."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.chaos import ENGINE, PROMPTS
from benchmarks.cluster_process import ClusterProcess

pytest.importorskip("ray", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]


def complete(cluster: ClusterProcess) -> str:
    body: dict[str, Any] = {"prompt": PROMPTS[3], "max_tokens": 800, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=90)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_requests_go_on_while_a_head_with_stored_state_restarts(tmp_path: Path) -> None:
    config = {
        "name": f"head-{os.getpid()}",
        "server": {"port": 0},
        "machine": {"num_cpus": 2},
        "target": {"engine": ENGINE},
    }
    stored = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "head")}
    with ClusterProcess(config, tmp_path, stored) as cluster, ThreadPoolExecutor(4) as pool:
        expected = complete(cluster)
        (head,) = [pid for pid, command in cluster.below().items() if "gcs_server" in command.split()[0]]
        command = Path(f"/proc/{head}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        environment = dict(
            each.split(b"=", 1) for each in Path(f"/proc/{head}/environ").read_bytes().split(b"\0") if b"=" in each
        )
        running = [pool.submit(complete, cluster) for _ in range(4)]
        os.kill(head, signal.SIGKILL)
        threading.Event().wait(1)
        restarted = subprocess.Popen(command, env=environment)
        try:
            assert [each.result() for each in running] == [expected] * 4
            threading.Event().wait(3)
            assert complete(cluster) == expected
            assert cluster.process.poll() is None
            assert cluster.close() == 0
        finally:
            restarted.kill()
            restarted.wait()
    assert not cluster.left()
