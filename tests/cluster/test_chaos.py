"""A short run of ``python -m benchmarks.chaos``: processes join, are killed and cut off; no token changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.chaos import run

pytest.importorskip("ray", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def test_no_request_is_lost_or_wrong(tmp_path: Path) -> None:
    report = run(seconds=8, requests=28, every=2, folder=tmp_path)
    assert report.requests == 28
    assert (report.lost, report.wrong, report.errors, report.left) == (0, 0, [], [])
    assert report.faults["join node"] and sum(report.faults.values()) >= 2
    assert report.running_after == 0
    assert report.checks and (report.leaks, report.sockets) == (0, [])
