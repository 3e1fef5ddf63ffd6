"""A node that leaves its verifier: its drafter serves the next verifier without requests of the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from cospec.core.types import DraftBudget
from harness.node_network import context
from harness.nodes import hub_for_tests, on_nodes, thread_node
from harness.remote_drafters import Recording
from harness.waiting import until

pytest.importorskip("zmq")


def test_a_node_that_leaves_frees_the_requests_of_its_drafter(tmp_path: Path) -> None:
    hub, log = hub_for_tests(), tmp_path / "log"
    drafter, executor = on_nodes(hub, "itself")
    with thread_node(hub, [("itself", Recording(log))]):
        until(lambda: [row["state"] for row in hub.status()] == ["ready"], "the node")
        executor.submit("propose", [context("a", (1, 2))], [DraftBudget(2, 2)]).result(10.0)
    drafter.close()
    assert log.read_text().splitlines() == ["propose a", "free a"]
