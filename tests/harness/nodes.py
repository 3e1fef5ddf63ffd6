"""Drafter nodes for tests: in a thread of this process, or in a process of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from anyio.from_thread import start_blocking_portal
from benchmarks.relay import Relay

from cospec.cluster.nodes.executor import NodeExecutor
from cospec.cluster.nodes.hub import NodeHub
from cospec.cluster.nodes.hub_options import NodesOptions
from cospec.cluster.nodes.keys import secure_node
from cospec.cluster.nodes.wire import FrameCodec, NodeHello, ToNode
from cospec.cluster.nodes.worker import DrafterNode, NodeOptions, OfferedDrafter
from cospec.config import LinkConfig
from cospec.core.plugin_base import Drafter
from cospec.runtime.drafter_process_executor import Build
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.runtime.executor_base import DrafterRecipe
from harness.remote_drafters import VOCAB, recipe_of

ANY_PORT = "tcp://127.0.0.1:*"


def hub_for_tests(vocab_size: int = VOCAB, **options: object) -> NodeHub:
    """A hub at a free port."""
    return NodeHub(NodesOptions.model_validate({"bind": ANY_PORT, **options}), vocab_size)


def on_nodes(hub: NodeHub, name: str, method: str = "draft_model") -> tuple[DrafterProxy, NodeExecutor]:
    """A drafter that nodes may offer, and its executor."""
    recipe: DrafterRecipe = replace(recipe_of(lambda: unused()), name=name, method=method, nodes=hub)
    drafter = NodeExecutor.place(recipe)
    assert isinstance(drafter, DrafterProxy) and isinstance(drafter.executor, NodeExecutor)
    return drafter, drafter.executor


def unused() -> Drafter:
    raise AssertionError("a drafter on nodes is built by its node")


@contextmanager
def thread_node(hub: NodeHub, offers: Sequence[tuple[str, Drafter]], vocab_size: int = VOCAB) -> Iterator[DrafterNode]:
    """A node in a thread of this process."""
    made = [OfferedDrafter(name, "draft_model", drafter, vocab_size) for name, drafter in offers]
    node = DrafterNode(NodeOptions(hub.address, "thread"), made)
    thread = threading.Thread(target=node.serve, name="test-node")
    thread.start()
    try:
        yield node
    finally:
        node.stop()
        thread.join()
        node.close()


class Peer:
    """A connection that speaks the protocol."""

    def __init__(self, address: str, keys: Path | None = None) -> None:
        import zmq

        self.codec, self._context = FrameCodec(ToNode), zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if keys is not None:
            secure_node(self.socket, keys)
        self.socket.connect(address)

    def say(self, frame: bytes) -> object:
        """Send a frame; returns the answer, None where none comes."""
        self.socket.send(frame)
        return self.receive()

    def receive(self, seconds: float = 2.0) -> object:
        return self.codec.decode(self.socket.recv()) if self.socket.poll(round(seconds * 1000)) else None

    def hello(self, **changes: object) -> bytes:
        given = {"node": "peer", "drafter": "itself", "method": "draft_model", "vocab_size": VOCAB, **changes}
        return self.codec.encode(NodeHello(**given))  # type: ignore[arg-type]

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@contextmanager
def peers(hub: NodeHub) -> Iterator[Callable[[], Peer]]:
    """A function that makes connections to a listening hub; the end closes all of them."""
    made: list[Peer] = []

    def connect() -> Peer:
        made.append(Peer(hub.address))
        return made[-1]

    yield connect
    for each in made:
        each.close()


class NodeProcess:
    """A node in a process of its own, forked from this process, which has loaded all modules."""

    def __init__(
        self,
        address: str,
        offers: Sequence[tuple[str, Build]],
        keys: Path | None = None,
        vocab_size: int = VOCAB,
        link: LinkConfig = LinkConfig(),
    ) -> None:
        arguments = (NodeOptions(address, "process", keys, link=link), offers, vocab_size)
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def close(self) -> None:
        """End the process, whatever state it is in."""
        self._process.kill()
        self._process.join()

    def wait(self) -> int | None:
        """Wait for the end; returns the exit code."""
        self._process.join(20)
        return self._process.exitcode


Start = Callable[..., NodeProcess]
"""Starts a node, see the fixture ``start``."""


@contextmanager
def relay_to(hub: NodeHub) -> Iterator[tuple[Relay, Callable[..., object]]]:
    """A relay to a listening hub, and what calls its functions in the relay's thread."""
    relay = Relay(int(hub.address.rpartition(":")[2]))
    with start_blocking_portal() as portal:
        portal.call(relay.open)
        try:
            yield relay, portal.call
        finally:
            portal.call(relay.close)


def _serve(options: NodeOptions, offers: Sequence[tuple[str, Build]], vocab_size: int) -> None:
    import torch

    torch.set_num_threads(1)
    made = [OfferedDrafter(name, "draft_model", build(), vocab_size) for name, build in offers]
    node = DrafterNode(replace(options, node=f"process-{os.getpid()}"), made)
    signal.signal(signal.SIGTERM, lambda *_: node.stop())
    node.serve()
    node.close()
