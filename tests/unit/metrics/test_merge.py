"""Metrics of several engines as one."""

from __future__ import annotations

from dataclasses import asdict

from cospec.metrics.engine import EngineMetrics
from cospec.metrics.merge import merge


def test_counters_are_sums_and_levels_are_means() -> None:
    first = EngineMetrics(
        requests_running=2,
        kv_cache_usage=0.5,
        drafts={"a": 3},
        accepted_per_pos={"a": [2, 1]},
        requests_finished={"stop": 1},
        execution_mode_info={"mode": "sequential"},
        policy={"speculation_length": 4.0},
        nodes=[{"node": "a"}],
    )
    second = EngineMetrics(
        requests_running=1,
        kv_cache_usage=0.1,
        drafts={"a": 1, "b": 5},
        accepted_per_pos={"a": [1, 1, 1]},
        requests_finished={"length": 2},
        execution_mode_info={"mode": "sequential"},
        policy={"speculation_length": 2.0},
    )
    joined = merge([asdict(first), asdict(second)])
    assert joined["requests_running"] == 3
    assert joined["kv_cache_usage"] == 0.3
    assert joined["drafts"] == {"a": 4, "b": 5}
    assert joined["accepted_per_pos"] == {"a": [3, 2, 1]}
    assert joined["requests_finished"] == {"stop": 1, "length": 2}
    assert joined["execution_mode_info"] == {"mode": "sequential"}
    assert joined["policy"] == {"speculation_length": 3.0}
    assert joined["nodes"] == [{"node": "a"}]
    assert joined["engines"] == 2
    assert merge([asdict(first)]) == asdict(first)
