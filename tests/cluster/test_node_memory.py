"""Peers that send messages without an end: the verifier's memory stays bounded, and honest nodes stay connected."""

from __future__ import annotations

import multiprocessing
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cospec.cluster.nodes.hub import NodeHub
from cospec.cluster.nodes.keys import make_keys
from cospec.cluster.nodes.unread_limit import MOST_UNREAD
from cospec.cluster.nodes.wire import MAX_BYTES, Welcome
from harness.nodes import Peer, hub_for_tests, on_nodes
from harness.waiting import until

psutil = pytest.importorskip("psutil")
pytest.importorskip("zmq")
pytestmark = pytest.mark.cluster

MEGABYTE = 1 << 20
SENT = 64 * MAX_BYTES
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + struct.pack(">I", 0)


def without_end(address: str, part: int) -> None:
    """Send parts of ``part`` bytes, each with the flag that another part follows."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw, suppress(OSError):
        raw.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        answer = b""
        while b"ROUTER" not in answer:
            answer += raw.recv(1000)
        header = b"\x03" + struct.pack(">Q", part) if part > 255 else b"\x01" + bytes([part])
        block = (header + bytes(part)) * max(1, MEGABYTE // (part + 2))
        for _ in range(SENT // len(block)):
            raw.sendall(block)
        time.sleep(60)


def encrypted_parts(address: str, keys: Path) -> None:
    """Join, then send one message of many parts."""
    peer = Peer(address, keys)
    peer.say(peer.hello(node="hostile"))
    peer.socket.send_multipart([bytes(MEGABYTE)] * (SENT // MEGABYTE), copy=False)
    time.sleep(60)


@contextmanager
def hostile(run: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    process = multiprocessing.get_context("fork").Process(target=run, args=args, daemon=True)
    process.start()
    yield process
    process.kill()
    process.join()


def growth(seconds: float = 2.0) -> int:
    """The most bytes by which this process grows meanwhile."""
    process, end = psutil.Process(), time.monotonic() + seconds
    before = most = process.memory_info().rss
    while time.monotonic() < end:
        most = max(most, process.memory_info().rss)
        time.sleep(0.005)
    return int(most - before)


def states(hub: NodeHub) -> dict[str, str]:
    return {row["node"]: row["state"] for row in hub.status()}


@pytest.mark.parametrize(("part", "most"), [(MAX_BYTES, 100 * MEGABYTE), (0, 32 * MOST_UNREAD + 200 * MEGABYTE)])
def test_a_message_without_an_end(part: int, most: int) -> None:
    """An empty part takes 2 bytes on the wire and 64 bytes in libzmq."""
    hub = hub_for_tests()
    drafter, _ = on_nodes(hub, "itself")
    honest = Peer(hub.address)
    assert isinstance(honest.say(honest.hello()), Welcome)
    with hostile(without_end, hub.address, part) as peer:
        assert growth() < most
        peer.join(10.0)
        assert peer.exitcode == 0, "the connection is cut"
    assert isinstance(honest.say(honest.hello()), Welcome)
    honest.close()
    drafter.close()


def test_a_node_with_keys_is_quarantined(tmp_path: Path) -> None:
    make_keys(tmp_path, ["node"])
    hub = hub_for_tests(keys=tmp_path)
    drafter, _ = on_nodes(hub, "itself")
    with hostile(encrypted_parts, hub.address, tmp_path):
        assert growth(3.0) < 100 * MEGABYTE
        until(lambda: states(hub) == {"hostile": "quarantined"}, "the quarantine")
    drafter.close()


def test_whole_messages_pass() -> None:
    """More bytes than the limit in all, each message before the next."""
    hub = hub_for_tests()
    drafter, _ = on_nodes(hub, "itself")
    peer = Peer(hub.address)
    for _ in range(3 * MOST_UNREAD // MAX_BYTES):
        peer.socket.send(bytes(MAX_BYTES))  # a damaged frame, which is dropped
        assert isinstance(peer.say(peer.hello()), Welcome)
    peer.close()
    drafter.close()
