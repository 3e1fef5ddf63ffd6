"""Faults of drafter nodes: killed, stopped, cut off and slow. Outputs are those without drafts, and nodes come back."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from itertools import pairwise

import pytest

from cospec.cluster.nodes.hub import NodeHub
from cospec.cluster.nodes.node_session import MISSES
from cospec.core.engine import Engine
from harness.node_engines import accepted, alone, nodes_of, rows, target, writes_the_same
from harness.nodes import Start, on_nodes, relay_to
from harness.pools import pool_engine, pool_of
from harness.remote_drafters import VOCAB
from harness.waiting import until

pytest.importorskip("zmq")
pytestmark = pytest.mark.cluster


def drafts_again(engine: Engine, hub: NodeHub) -> None:
    until(lambda: rows(hub, "ready") == 1, "the node, or a new one")
    before = accepted(engine)
    writes_the_same(engine, "again")
    assert accepted(engine) > before


def goes_on_without(engine: Engine, hub: NodeHub, caplog: pytest.LogCaptureFixture, fault: Callable[[], object]) -> str:
    """Requests write the same while a fault takes their only node away; returns the node's name."""

    def before(step: int) -> None:
        if step == 3:
            until(lambda: rows(hub, "ready") == 1, "the node")
            caplog.clear()
            fault()

    (name,) = nodes_of(hub)
    caplog.set_level(logging.INFO, "cospec.cluster.nodes")
    writes_the_same(engine, "fault", before)
    return name


def lines_about(name: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Modules of the log lines that name the node."""
    return [record.module for record in caplog.records if isinstance(record.args, tuple) and name in record.args]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_ends_costs_drafts(
    end: signal.Signals, hub: NodeHub, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, engine = alone(hub)
    node = start(hub, "itself")
    until(lambda: rows(hub, "ready") == 1, "the node")

    def ends() -> None:
        node.send(end)
        node.wait()

    name = goes_on_without(engine, hub, caplog, ends)
    until(lambda: not hub.status(), "the node is gone")
    assert lines_about(name, caplog) == ["hub"] and hub.totals()[0]["ended"] == 1
    start(hub, "itself")
    drafts_again(engine, hub)
    drafter.close()


def test_a_stopped_node_is_left_out_and_comes_back(
    hub: NodeHub, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cospec.cluster.nodes.hub.SILENT_SECONDS", 60.0)  # a slow machine is no reason to go
    drafter, engine = alone(hub)
    node = start(hub, "itself")
    until(lambda: rows(hub, "ready") == 1, "the node")
    writes_the_same(engine, "a")
    name = goes_on_without(engine, hub, caplog, lambda: node.send(signal.SIGSTOP))
    assert rows(hub, "late") == 1, "requests go on without the node"
    assert lines_about(name, caplog) == ["node_session"] and hub.totals()[0]["late"] >= MISSES
    node.send(signal.SIGCONT)
    drafts_again(engine, hub)
    drafter.close()


def test_a_node_is_cut_off_and_comes_back(
    hub: NodeHub, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte passes, and no connection ends: the node is late first, and gone after some silence."""
    monkeypatch.setattr("cospec.cluster.nodes.hub.SILENT_SECONDS", 3.0)
    drafter, engine = alone(hub)
    with relay_to(hub) as (relay, call):
        start(relay, "itself")
        until(lambda: rows(hub, "ready") == 1, "the node")
        writes_the_same(engine, "a")
        connected = list[int]()

        def cut() -> None:
            call(relay.cut)
            connected.append(relay.connected)

        name = goes_on_without(engine, hub, caplog, cut)
        assert connected == [1] and hub.totals()[0]["late"] >= MISSES
        until(lambda: not hub.status(), "the node is gone")
        assert lines_about(name, caplog) == ["node_session", "hub"] and hub.totals()[0]["ended"] == 1
        call(relay.heal)
        drafts_again(engine, hub)
        assert nodes_of(hub) == {name}
    drafter.close()


def test_a_step_without_a_late_node_has_the_drafts_of_the_pool(hub: NodeHub, start: Start) -> None:
    """The deadline is learned from fast answers; then every answer of one node takes a second."""
    names = ("itself", "sluggish")
    pool = pool_of({name: on_nodes(hub, name)[0] for name in names}, "union", "all", VOCAB)
    for name in names:
        start(hub, name)
    until(lambda: rows(hub, "ready") == 2, "both nodes")
    engine = pool_engine(target(), pool, "match")
    writes_the_same(engine, "fast")
    until(lambda: rows(hub, "ready") == 2, "both nodes")
    seen: list[tuple[int, int]] = []

    def count(step: int) -> None:
        late = {row["drafter"]: row["late"] for row in hub.totals()}
        seen.append((late["sluggish"], engine.metrics().accepted_tokens["itself"]))

    writes_the_same(engine, "slow", count)
    used = [after[1] - before[1] for before, after in pairwise(seen) if after[0] > before[0]]
    assert used and sum(used) > 0, "steps that passed the node's deadline have drafts of the other"
    engine.close()
