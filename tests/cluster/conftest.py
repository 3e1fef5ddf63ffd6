"""One cluster of two replicas and two drafter nodes, which the tests with Ray share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from benchmarks.chaos import DRAFTERS, ENGINE, ON_NODES
from benchmarks.cluster_process import ClusterProcess

CONFIG = {
    "name": f"test-{os.getpid()}",
    "server": {"port": 0},
    "machine": {"num_cpus": 4},
    "health": {"period": 1, "timeout": 3, "grace": 1, "head": 3},
    "target": {"engine": {**ENGINE, "speculative_config": ON_NODES}, "scale": {"min": 2, "max": 2}},
    "drafters": DRAFTERS,
}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """The cluster; the last test that runs, in ``test_replicas.py``, ends its head."""
    with ClusterProcess(CONFIG, tmp_path_factory.mktemp("cluster")) as running:
        yield running
    assert not running.left()
