"""The number of drafter nodes follows their work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

node_actor = pytest.importorskip("cospec.cluster.node_actor", reason="the extra cluster is not installed")


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"a": 0.1}, 1),
        ({"a": 0.49}, 1),
        ({"a": 0.51}, 2),
        ({"a": 1.0, "b": 1.0}, 4),
        ({"a": 0.2, "b": 0.1, "c": 0.0}, 1),
        ({"a": 0.0}, 1),
    ],
    ids=str,
)
def test_enough_nodes_for_the_work(shares: dict[str, float], expected: int) -> None:
    context = SimpleNamespace(aggregated_metrics={node_actor.BUSY: shares}, target_num_replicas=7)
    assert node_actor.NodePolicy(busy=0.5)(cast(Any, context)) == (expected, {})


@pytest.mark.parametrize("found", [None, {}, {"other": {"a": 1.0}}])
def test_the_number_stays_until_a_node_reports(found: dict[str, dict[str, float]] | None) -> None:
    context = SimpleNamespace(aggregated_metrics=found, target_num_replicas=3)
    assert node_actor.NodePolicy(busy=0.5)(cast(Any, context)) == (3, {})
