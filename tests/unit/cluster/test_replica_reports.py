"""Which replicas serve, which are lost, and counts that outlive a replica."""

from __future__ import annotations

import pytest

from cospec.cluster.replica_reports import ReplicaReport, ReplicaReports

PATIENCE = 15.0


class Time:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def reports(time: Time) -> ReplicaReports:
    return ReplicaReports(PATIENCE, time)


def test_a_replica_that_ends_is_lost_unless_the_replica_left(reports: ReplicaReports) -> None:
    for name in ("a", "b", "c"):
        reports.note(ReplicaReport(name, True))
    reports.note(ReplicaReport("c", False, leaves=True))
    reports.keep({"a", "b", "c", "another actor"})
    assert reports.lost == 0
    reports.keep({"a"})
    reports.keep({"a"})
    assert reports.lost == 1


def test_sums_keep_the_counts_of_replicas_that_ended(reports: ReplicaReports) -> None:
    reports.note(ReplicaReport("a", True, 1, 3))
    reports.note(ReplicaReport("a", True, 2, 4))
    reports.note(ReplicaReport("b", True, 5, 0))
    assert (reports.engine_restarts, reports.stage_host_restarts) == (7, 4)
    reports.keep({"b"})
    reports.note(ReplicaReport("c", True, 1, 1))
    assert (reports.engine_restarts, reports.stage_host_restarts) == (8, 5)


def test_a_late_report_changes_no_count(reports: ReplicaReports) -> None:
    reports.note(ReplicaReport("a", False, 2, 4, leaves=True))
    reports.note(ReplicaReport("a", True, 1, 3))
    assert (reports.engine_restarts, reports.stage_host_restarts) == (2, 4)
    reports.keep(())
    reports.note(ReplicaReport("a", True, 2, 4))
    assert (reports.engine_restarts, reports.stage_host_restarts, reports.lost) == (2, 4, 0)


def test_one_replica_that_serves_is_enough(reports: ReplicaReports) -> None:
    reports.note(ReplicaReport("a", False))
    assert not reports.serves
    reports.note(ReplicaReport("b", True))
    assert reports.serves
    reports.keep({"a"})
    assert not reports.serves


def test_an_old_report_does_not_say_that_a_replica_serves(reports: ReplicaReports, time: Time) -> None:
    assert reports.serves  # before the first report
    time.now += PATIENCE
    reports.note(ReplicaReport("a", True))
    time.now += PATIENCE
    assert reports.serves
    time.now += 1
    assert not reports.serves
    reports.keep(())
    assert not reports.serves
