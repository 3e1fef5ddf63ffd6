"""A cluster that never finds a place for its target: a sentence says so, and the cluster can be stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.chaos import ENGINE
from benchmarks.cluster_process import ClusterProcess

from harness.waiting import until

pytest.importorskip("ray", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]

NAME = f"test-start-{os.getpid()}"
CONFIG = {
    "name": NAME,
    "server": {"port": 0},
    "machine": {"num_cpus": 1},
    "target": {"engine": ENGINE, "placement": {"labels": {"zone": "mars"}}},
}


def start(name: str) -> subprocess.Popen[bytes]:
    """Run ``cospec cluster status`` or ``down``."""
    arguments = [sys.executable, "-m", "cospec", "cluster", name, "--name", NAME]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL)


def test_a_start_without_a_place_is_explained_and_stopped(tmp_path: Path) -> None:
    cluster = ClusterProcess(CONFIG, tmp_path)
    cluster.start()
    try:
        until(lambda: start("status").wait(60) == 0 or cluster.process.poll() is not None, "a running cluster")
        # A slow machine may first name deployments that start a moment later.
        sentence = f'cospec cluster {NAME} waits for target ({{"num_cpus": 1, "labels": {{"zone": "mars"}}}})'
        until(lambda: sentence in cluster.log or cluster.process.poll() is not None, sentence, 100)
        assert sentence in cluster.log
        cluster.below()
        down = start("down")
        assert cluster.process.wait(60) == 0, cluster.log
        assert down.wait(60) == 0
    finally:
        cluster.close()
    assert not cluster.left()
