"""The process of a drafter node: one thread that reads a message, drafts and answers.

Each drafter of the node has a connection of its own. A verifier that is not there yet, or starts again, gets the offer
again. Nothing that the verifier sends ends the process.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cospec.cluster.nodes.delayed_link import LINGER, DelayedLink
from cospec.cluster.nodes.hub_options import check_address, zeromq
from cospec.cluster.nodes.keys import secure_node
from cospec.cluster.nodes.service import NodeService
from cospec.cluster.nodes.wire import MAX_ENCRYPTED_BYTES, NodeHeartbeat, NodeHello, NodeLeave
from cospec.config import LinkConfig
from cospec.core.plugin_base import Drafter
from cospec.errors import InvalidInput, words

BEAT_SECONDS = 1.0  # between two messages of an idle node, and between two offers
RETRY_SECONDS = 2.0  # after a verifier that does not know the node's key; libzmq itself would not try again
UNKNOWN_KEY = "the verifier does not know the node's key; the node tries again"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Where a node belongs.

    Attributes:
        address: of the verifier, as its ``drafter_nodes.bind``.
        node: the node's own name.
        keys: the folder with the node's keys; None: no encryption, allowed within one machine only.
        cost_per_hour: what the node costs, with all of its drafters.
        link: delays that are added in each direction, for tests and measurements.
    """

    address: str
    node: str
    keys: Path | None = None
    cost_per_hour: float = 0.0
    link: LinkConfig = LinkConfig()


@dataclass(frozen=True, slots=True)
class OfferedDrafter:
    """A drafter of a node, with its name and method in the configuration of the verifier."""

    name: str
    method: str
    drafter: Drafter
    vocab_size: int


class RefusedKey:
    """Notices that the verifier does not know the key of a connection, and connects again.

    The operator may add the key later. libzmq ends a connection whose handshake fails, and would not try again.
    """

    def __init__(self, socket: Any, address: str) -> None:
        self._socket, self._address, self._again = socket, address, 0.0
        self._monitor = socket.get_monitor_socket(zeromq().EVENT_HANDSHAKE_FAILED_AUTH)

    def look(self) -> bool:
        """Return whether the key was refused since the latest call; connect again if that is due."""
        refused, now = False, time.monotonic()
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            refused = True
        if refused:
            self._again = now + RETRY_SECONDS
        elif self._again and now >= self._again:
            self._again = 0.0
            self._socket.disconnect(self._address)
            self._socket.connect(self._address)
        return refused

    def close(self) -> None:
        """Close the monitor, for which the end of the context would wait."""
        self._socket.disable_monitor()
        self._monitor.close()


class DrafterNode:
    """Connects drafters to a verifier.

    Attributes:
        busy: seconds of work on messages so far.

    Raises:
        InvalidInput: the address is wrong, or not allowed without keys.
    """

    def __init__(self, options: NodeOptions, offers: Sequence[OfferedDrafter]) -> None:
        check_address("address", options.address, options.keys)
        zmq = zeromq()
        self._context, self._poller = zmq.Context(), zmq.Poller()
        self._services: dict[Any, NodeService] = {}
        self._spoken: dict[Any, float] = {}
        self._links: list[DelayedLink] = []
        self._refused_keys: dict[Any, RefusedKey] = {}
        self._stopped = False
        self.busy = 0.0
        try:
            for offer in offers:
                self._connect(options, offer, len(offers))
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """End ``serve`` after the message at work."""
        self._stopped = True

    def serve(self, note: Callable[[str], None] = log.info) -> None:
        """Serve until ``stop``; ``note`` gets a sentence where a connection changes."""
        states = dict.fromkeys(self._services, "")
        while not self._stopped:
            for socket, service in self._services.items():
                if (refused_key := self._refused_keys.get(socket)) and refused_key.look():
                    service.refused = UNKNOWN_KEY
                self._speak(socket, service)
                state = service.refused or ("joined" if service.welcome else "waits for the verifier")
                if state != states[socket]:
                    states[socket] = state
                    note(f"{service.hello.node}, drafter {service.hello.drafter}: {state}")
            for socket, _ in self._poller.poll(BEAT_SECONDS * 1000 / 4):
                self._serve(socket)

    def close(self) -> None:
        """Tell the verifier, close all connections, and free the drafters of requests."""
        for socket, service in self._services.items():
            self._send(socket, service.encode(NodeLeave()))
        for socket in list(self._refused_keys):
            self._forget_key(socket)
        for link in self._links:
            link.end()
        for socket in self._services:
            socket.close(LINGER)
        left = list(self._services.values())
        self._services.clear()
        self._links.clear()
        self._context.term()
        for service in left:
            service.forget_all()

    def _connect(self, options: NodeOptions, offer: OfferedDrafter, offers: int) -> None:
        zmq = zeromq()
        drafter, cost = offer.drafter, options.cost_per_hour / offers
        abilities = drafter.scores_known_tokens, drafter.is_stepwise
        hello = NodeHello(options.node, offer.name, offer.method, offer.vocab_size, cost, *abilities)
        socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.maxmsgsize, socket.immediate = 0, MAX_ENCRYPTED_BYTES, True
        socket.sndhwm, socket.rcvhwm = 64, 256
        socket.heartbeat_ivl, socket.heartbeat_timeout = 1000, 5000
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        try:
            if options.keys is not None:
                secure_node(socket, options.keys)
                self._refused_keys[socket] = RefusedKey(socket, options.address)
            socket.connect(options.address)
        except BaseException as error:
            self._forget_key(socket)
            socket.close()
            if not isinstance(error, zmq.ZMQError):
                raise
            raise InvalidInput("address", words(f"{options.address} ({error})"), "tcp://HOST:PORT") from None
        if options.link != LinkConfig():
            self._forget_key(socket)  # the link's thread has the socket
            self._links.append(DelayedLink(self._context, socket, options.link))
            socket = self._links[-1].inside
        service = NodeService(drafter, hello, time.monotonic)
        self._services[socket], self._spoken[socket] = service, 0.0

    def _forget_key(self, socket: Any) -> None:
        if (refused_key := self._refused_keys.pop(socket, None)) is not None:
            refused_key.close()

    def _speak(self, socket: Any, service: NodeService) -> None:
        """Offer the drafter, or say that the node is alive; as soon as the connection is there."""
        zmq, now = zeromq(), time.monotonic()
        due = now - self._spoken[socket] >= BEAT_SECONDS and now >= service.hello_at
        sent = due and self._send(socket, service.encode(NodeHeartbeat() if service.welcome else service.hello))
        if sent:
            self._spoken[socket] = now
        self._poller.register(socket, zmq.POLLIN if sent or not due else zmq.POLLIN | zmq.POLLOUT)

    def _serve(self, socket: Any) -> None:
        """Handle all messages of a connection."""
        zmq, service, frames = zeromq(), self._services[socket], list[bytes]()
        while True:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            frames.append(b"".join(parts))
        for number, frame in enumerate(frames, 1):
            started = time.monotonic()
            answer = service.handle(frame, len(frames) - number)
            ended = time.monotonic()
            self.busy += ended - started
            if answer is not None:
                self._spoken[socket] = ended
                self._send(socket, answer)

    def _send(self, socket: Any, frame: bytes) -> bool:
        """Send without waiting; whether the frame is sent. A frame to a verifier that is not there is lost."""
        zmq = zeromq()
        with suppress(zmq.Again):
            socket.send(frame, zmq.NOBLOCK)
            return True
        return False


def run_node(options: NodeOptions, offers: Sequence[OfferedDrafter], note: Callable[[str], None]) -> None:
    """Serve until a signal ends the process: SIGINT or SIGTERM."""
    node = DrafterNode(options, offers)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: node.stop())
    try:
        node.serve(note)
    finally:
        node.close()
