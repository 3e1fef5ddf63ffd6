"""Keys of drafter nodes that come and go while the verifier runs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from cospec.cluster.nodes.hub import NodeHub
from cospec.cluster.nodes.keys import make_keys
from cospec.cluster.nodes.wire import MAX_BYTES, Welcome
from harness.nodes import NodeProcess, Peer, hub_for_tests, on_nodes
from harness.remote_drafters import toy
from harness.waiting import until

pytest.importorskip("zmq")
pytestmark = pytest.mark.cluster


def nodes_of(hub: NodeHub) -> set[str]:
    return {row["node"] for row in hub.status()}


def test_keys_come_and_go_while_the_verifier_runs(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ["first"])
    hub = hub_for_tests(keys=keys)
    drafter, _ = on_nodes(hub, "itself")

    def joined(name: str) -> Peer:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for file in ("verifier.key", f"{name}.key_secret"):
            (folder / file).write_bytes((keys / file).read_bytes())
        peer = Peer(hub.address, folder)
        peer.socket.send(peer.hello(node=name))
        return peer

    first = joined("first")
    until(lambda: nodes_of(hub) == {"first"}, "the first node")
    make_keys(keys, ["second"])
    second = joined("second")
    until(lambda: nodes_of(hub) == {"first", "second"}, "a node whose key is new", 8.0)
    (keys / "nodes" / "first.key").unlink()
    until(lambda: nodes_of(hub) == {"second"}, "the end of the node without a key", 4.0)
    first.close()
    again = joined("first")
    time.sleep(1.0)
    assert nodes_of(hub) == {"second"}
    for peer in (second, again):
        peer.close()
    drafter.close()


def test_a_node_whose_key_comes_later_joins(tmp_path: Path) -> None:
    keys, own, later = tmp_path / "keys", tmp_path / "own", tmp_path / "later"
    make_keys(keys, ["first"])
    make_keys(later, ["late"])
    own.mkdir()
    (own / "verifier.key").write_bytes((keys / "verifier.key").read_bytes())
    (own / "late.key_secret").write_bytes((later / "late.key_secret").read_bytes())
    hub = hub_for_tests(keys=keys)
    drafter, _ = on_nodes(hub, "itself")
    node = NodeProcess(hub.address, [("itself", toy("itself"))], own)
    time.sleep(2.0)
    assert not hub.status()
    (keys / "nodes" / "late.key").write_bytes((later / "nodes" / "late.key").read_bytes())
    until(lambda: len(nodes_of(hub)) == 1, "the node whose key came later", 15.0)
    node.send(signal.SIGTERM)
    assert node.wait() == 0
    drafter.close()


def test_the_longest_frame_passes_encryption(tmp_path: Path) -> None:
    import zmq

    make_keys(tmp_path, ["node"])
    hub = hub_for_tests(keys=tmp_path)
    drafter, _ = on_nodes(hub, "itself")
    peer = Peer(hub.address, tmp_path)
    ended = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    assert isinstance(peer.say(peer.hello()), Welcome)
    peer.socket.send(bytes(MAX_BYTES))  # a damaged frame, which is dropped
    assert isinstance(peer.say(peer.hello()), Welcome)
    assert not ended.poll(0), "the connection is the same"
    peer.socket.disable_monitor()
    ended.close()
    peer.close()
    drafter.close()
