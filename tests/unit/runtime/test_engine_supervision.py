"""When an engine process counts as frozen, and when a dead one is started again."""

from __future__ import annotations

from cospec.runtime.engine_supervision import (
    HEALTHY_SECONDS,
    KILL_FACTOR,
    MAX_DELAY,
    ProgressMonitor,
    RestartPolicy,
    Supervision,
)


def test_only_a_counter_that_stands_still_is_frozen() -> None:
    supervision = Supervision(timeout=4)
    monitor, looks = ProgressMonitor(supervision), round(4 / supervision.tick)
    for count in range(10 * looks):
        monitor.observe(count // (looks // 2))
        assert not monitor.frozen
    for _ in range(looks):
        monitor.observe(1000)
    assert not monitor.frozen  # the first of these looks saw progress
    monitor.observe(1000)
    assert monitor.frozen and not monitor.hopeless
    for _ in range((KILL_FACTOR - 1) * looks):
        monitor.observe(1000)
    assert monitor.hopeless
    monitor.observe(1001)
    assert not monitor.frozen and not monitor.hopeless


def test_restarts_back_off_and_end() -> None:
    policy = RestartPolicy(Supervision(max_restarts=20))
    delays = [policy.died(served=0.0) for _ in range(20)]
    assert delays[:3] == [0.5, 1.0, 2.0]
    assert delays[-1] == MAX_DELAY
    assert policy.died(served=HEALTHY_SECONDS) == 0.5  # a new row
    assert [RestartPolicy(Supervision(max_restarts=0)).died(served=1e9)] == [None]


def test_deaths_in_a_row_end_the_engine_however_long_loading_takes() -> None:
    policy = RestartPolicy(Supervision(max_restarts=3))
    assert [policy.died(served=1.0) is None for _ in range(4)] == [False, False, False, True]


def test_a_restart_may_take_longer_than_the_first_start() -> None:
    supervision = Supervision(timeout=10.0)
    assert [supervision.restart_limit(first) for first in (0.0, 1.0, 100.0)] == [30.0, 30.0, 500.0]
