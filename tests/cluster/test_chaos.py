"""A short part of ``python -m benchmarks.chaos``: processes are killed and paused under load, and no token changes."""

from __future__ import annotations

import time

import pytest
from benchmarks.chaos import strain
from benchmarks.cluster_process import ClusterProcess

pytest.importorskip("ray", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def test_no_request_is_lost_or_wrong(cluster: ClusterProcess) -> None:
    report = strain(cluster, seconds=16, requests=48, every=4)
    assert report.requests == 48
    assert (report.lost, report.wrong, report.errors) == (0, 0, [])
    assert sum(report.faults.values()) >= 2
    assert report.running_after == 0
    end = time.monotonic() + 90
    while len(cluster.engines()) < 2 and time.monotonic() < end:
        time.sleep(0.2)
    assert len(cluster.engines()) == 2, "lost replicas are replaced"
