"""Peers at the verifier's socket: repeated, changed and wrong messages end neither the thread nor the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import msgspec
import pytest

from cospec.cluster.nodes.executor import NodeExecutor
from cospec.cluster.nodes.hub import NodeHub
from cospec.cluster.nodes.node_session import MISSES, NodeSession
from cospec.cluster.nodes.quarantine import (
    MOST_KEYS,
    MOST_NAMES,
    OTHERS,
    QUARANTINE_SECONDS,
    NodeKeyRecords,
    NodeTotals,
)
from cospec.cluster.nodes.wire import (
    HEADER,
    LONGEST_REASON,
    MAGIC,
    VERSION,
    AskDrafts,
    NodeDrafts,
    NodeLeave,
    Refused,
    Welcome,
)
from cospec.core.types import DraftBudget
from cospec.server.node_metrics import node_families
from harness.node_network import context
from harness.nodes import Peer, hub_for_tests, on_nodes, peers
from harness.waiting import until

pytest.importorskip("zmq")


@pytest.fixture
def executor() -> Iterator[tuple[NodeHub, NodeExecutor]]:
    hub = hub_for_tests(deadline=0.02)
    drafter, executor = on_nodes(hub, "itself")
    yield hub, executor
    drafter.close()


@pytest.fixture
def hub(executor: tuple[NodeHub, NodeExecutor]) -> NodeHub:
    return executor[0]


@pytest.fixture
def peer(hub: NodeHub) -> Iterator[Callable[[], Peer]]:
    with peers(hub) as connect:
        yield connect


def states(hub: NodeHub) -> list[str]:
    return [row["state"] for row in hub.status()]


def test_a_repeated_offer_is_welcomed_again(hub: NodeHub, peer: Callable[[], Peer]) -> None:
    """A node repeats its offer while the verifier is busy."""
    node = peer()
    for _ in range(3):
        assert isinstance(node.say(node.hello()), Welcome)
    assert states(hub) == ["ready"]
    assert isinstance(peer().say(node.hello()), Welcome), "the thread goes on"


def test_a_changed_offer_breaks_the_protocol(hub: NodeHub, peer: Callable[[], Peer]) -> None:
    node = peer()
    assert isinstance(node.say(node.hello()), Welcome)
    answer = node.say(node.hello(node="another"))
    assert isinstance(answer, Refused) and "changes its offer" in answer.reason
    assert states(hub) == ["quarantined"]


def test_a_message_of_several_parts_breaks_the_protocol(hub: NodeHub, peer: Callable[[], Peer]) -> None:
    node = peer()
    assert isinstance(node.say(node.hello()), Welcome)
    node.socket.send_multipart([node.hello()] * 2)
    answer = node.receive()
    assert isinstance(answer, Refused) and "several parts" in answer.reason


def test_an_exception_excludes_the_peer_alone(
    hub: NodeHub, peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(link: NodeSession, message: Any) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(NodeSession, "answer", fails)
    hostile = peer()
    assert isinstance(hostile.say(hostile.hello()), Welcome)
    answer = hostile.say(hostile.codec.encode(NodeDrafts(1, [], 0.0)))
    assert isinstance(answer, Refused) and "ZeroDivisionError" in answer.reason
    assert [(row["state"], row["damaged"]) for row in hub.status()] == [("quarantined", 1)]
    honest = peer()
    assert isinstance(honest.say(honest.hello()), Welcome), "the thread goes on"


@pytest.mark.parametrize("joined", [True, False])
def test_an_error_that_quotes_a_long_message_is_cut(joined: bool, hub: NodeHub, peer: Callable[[], Peer]) -> None:
    hostile, payload = peer(), msgspec.msgpack.encode({"type": "x" * (4 << 20)})[: (4 << 20) - HEADER.size]
    payload = msgspec.msgpack.encode({"type": "x" * (len(payload) - 32)})
    if joined:
        assert isinstance(hostile.say(hostile.hello()), Welcome)
    answer = hostile.say(HEADER.pack(MAGIC, VERSION, crc32(payload)) + payload)
    assert isinstance(answer, Refused) and len(answer.reason) <= LONGEST_REASON
    honest = peer()
    assert isinstance(honest.say(honest.hello()), Welcome), "the thread goes on"


def test_a_late_node_that_joins_again_is_asked_after_a_probe(
    executor: tuple[NodeHub, NodeExecutor], peer: Callable[[], Peer]
) -> None:
    hub, drafter = executor
    node = peer()
    assert isinstance(node.say(node.hello()), Welcome)
    for number in range(MISSES):
        assert not drafter.submit("propose", [context(f"r{number}", [1])], [DraftBudget(1, 1)]).result()
        assert isinstance(node.receive(), AskDrafts)
    assert states(hub) == ["late"]
    node.socket.send(node.codec.encode(NodeLeave()))
    assert isinstance(node.say(node.hello()), Welcome)
    assert states(hub) == ["late"]
    probe = node.receive(5.0)
    assert isinstance(probe, AskDrafts) and not probe.updates
    node.socket.send(node.codec.encode(NodeDrafts(probe.number, [], 0.0)))
    until(lambda: states(hub) == ["ready"], "the answer to the probe")


def test_counts_outlive_connections(executor: tuple[NodeHub, NodeExecutor], peer: Callable[[], Peer]) -> None:
    hub, drafter = executor
    for joined in (1, 2):
        node = peer()
        assert isinstance(node.say(node.hello()), Welcome)
        assert not drafter.submit("propose", [context(f"r{joined}", [1])], [DraftBudget(1, 1)]).result()
        for ended in (False, True):
            (row,) = hub.totals()
            counts = row["late"], row["lost"], row["ended"]
            assert (row["node"], row["drafter"], *counts) == ("peer", "itself", joined, *[joined - 1 + ended] * 2)
            if not ended:
                node.socket.send(node.codec.encode(NodeLeave()))
                until(lambda: not hub.status(), "the end of the connection")
    (lost,) = [each for each in node_families([], hub.totals(), "m") if each.name.endswith("_lost")]
    assert [sample.value for sample in lost.samples] == [2.0]


def test_counts_of_many_names_are_joined() -> None:
    totals = NodeTotals()
    for number in range(MOST_NAMES + 5):
        totals.end((f"node{number}", "a", {"lost": 1}))
    rows = {row["node"]: row["lost"] for row in totals.rows([("node0", "a", {"lost": 2})])}
    assert len(rows) == MOST_NAMES + 1 and rows[OTHERS] == 5 and rows["node0"] == 3


def test_quarantines_double_and_end() -> None:
    now = 0.0
    records = NodeKeyRecords(lambda: now)
    for times in range(3):
        assert records.exclude("a", {"node": "n"}) == QUARANTINE_SECONDS * 2**times
        assert records.excluded("a") and not records.excluded("b") and records.statuses() == [{"node": "n"}]
        now += QUARANTINE_SECONDS * 2**times
        assert not records.excluded("a") and not records.statuses()


def test_a_full_table_keeps_quarantines() -> None:
    records = NodeKeyRecords(lambda: 0.0)
    records.exclude("a", None)
    for number in range(2 * MOST_KEYS):
        records.keep_pause(f"late{number}", 1.0)
    assert records.excluded("a")
    assert records.pause(f"late{2 * MOST_KEYS - 1}") == 1.0 and records.pause("late0") == 0.0
