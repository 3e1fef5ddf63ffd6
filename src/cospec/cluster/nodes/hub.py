"""The verifier's socket: every drafter node connects to this one address.

The engine's thread sends and receives by itself while it waits for drafts, so a step needs no switch of threads.
Between steps a background thread reads what nodes say: offers, beats, late answers. One lock guards both.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from cospec.cluster.nodes.deadline import ResponseTimes
from cospec.cluster.nodes.hub_options import BIND, NodesOptions, check_address, zeromq
from cospec.cluster.nodes.keys import AdmittedNodes
from cospec.cluster.nodes.node_session import NodeSession
from cospec.cluster.nodes.quarantine import QUARANTINE_SECONDS, Counted, NodeKeyRecords, NodeTotals
from cospec.cluster.nodes.unread_limit import UnreadLimit
from cospec.cluster.nodes.wire import (
    LONGEST_NAME,
    LONGEST_REASON,
    MAX_ENCRYPTED_BYTES,
    DamagedFrame,
    FrameCodec,
    HelloRequest,
    NodeDrafts,
    NodeHeartbeat,
    NodeHello,
    NodeLeave,
    NodeMessage,
    NodeScores,
    NodeSteps,
    Refused,
    ToVerifier,
    Welcome,
)
from cospec.core.interfaces import Clock
from cospec.errors import InvalidInput, words
from cospec.runtime.codec import ProtocolError

LOOK_SECONDS = 0.02  # between two looks of the background thread
KEYS_SECONDS = 1.0  # between two looks for removed keys
SILENT_SECONDS = 5.0  # after which a node without a word counts as gone
MOST_READ = 256  # messages of one look, so that a peer that floods the socket cannot hold the engine
MOST_PEERS = 256  # nodes at a time

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OfferedSlot:
    """A drafter of the configuration that nodes may offer.

    Attributes:
        samples: the drafter draws its tokens.
        busy: seconds of the drafter on all nodes so far.
        links: by the identity of the connection.
    """

    name: str
    method: str
    samples: bool
    busy: float = 0.0
    links: dict[bytes, NodeSession] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """A connection with an accepted offer, of one authenticated key."""

    key: str
    slot: OfferedSlot
    link: NodeSession


class NodeHub:
    """Connects drafters of the configuration with nodes. Opens its socket with the first drafter.

    Args:
        vocab_size: of the target.

    Attributes:
        lock: held by a thread that reads messages or uses a ``NodeSession``.
    """

    def __init__(self, options: NodesOptions, vocab_size: int, clock: Clock = time.monotonic) -> None:
        self.options, self.vocab_size, self.clock = options, vocab_size, clock
        self.slots: dict[str, OfferedSlot] = {}
        self.address = ""
        self._peers: dict[bytes, Peer] = {}  # by the identity of the connection
        self._key_records, self._totals = NodeKeyRecords(clock), NodeTotals()
        self._socket: Any = None
        self._context: Any = None
        self._admitted: AdmittedNodes | None = None
        self._keys_at = 0.0
        self._unread = UnreadLimit()
        self.lock = threading.RLock()
        self._closed = threading.Event()
        self._messages = FrameCodec(ToVerifier)

    def add(self, name: str, method: str, samples: bool) -> OfferedSlot:
        """Let nodes offer a drafter of that name.

        Raises:
            InvalidInput: the address cannot be bound, or is not allowed without keys.
            CospecError: ZeroMQ is missing.
        """
        with self.lock:
            self._open()
            slot = self.slots[name] = OfferedSlot(name, method, samples)
        return slot

    def remove(self, slot: OfferedSlot) -> None:
        """No node may offer the drafter any more. The socket closes with the last drafter."""
        with self.lock:
            if self.slots.get(slot.name) is not slot:
                return
            del self.slots[slot.name]
            for identity in list(slot.links):
                self._tell(identity, HelloRequest())
                self._drop(identity)
        if not self.slots:
            self._close()

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Whether a frame left for a node. A node that is gone, or does not read, gets nothing."""
        zmq = zeromq()
        with self.lock:
            if self._socket is None:
                return False
            try:
                self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
            except zmq.Again:
                return False  # the node does not read
            except zmq.ZMQError:
                if identity in self._peers:
                    log.warning("node %s is gone", self._peers[identity].link.hello.node)
                    self._drop(identity)
                return False
        return True

    def attend(self, seconds: float) -> None:
        """Read what nodes say: wait up to ``seconds`` for the first message, then take all that are there."""
        with self.lock:
            if self._socket is None:
                return
            if self._socket.poll(max(0, round(seconds * 1000 + 0.499))):
                self._read_all()

    def status(self) -> list[dict[str, Any]]:
        """One object per node: what it offers, its load, times and counts."""
        with self.lock:
            return [*map(_status, self._peers.values()), *self._key_records.statuses()]

    def totals(self) -> list[dict[str, Any]]:
        """Counts since the start, one object per node and drafter."""
        with self.lock:
            return self._totals.rows(map(_counted, self._peers.values()))

    def _open(self) -> None:
        if self._socket is not None:
            return
        zmq = zeromq()
        check_address(BIND, self.options.bind, self.options.keys)
        self._closed.clear()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.linger, socket.maxmsgsize = 100, MAX_ENCRYPTED_BYTES
        socket.router_mandatory, socket.sndhwm, socket.rcvhwm = True, 64, 32
        socket.heartbeat_ivl, socket.heartbeat_timeout = 1000, 5000
        try:
            if self.options.keys is not None:
                self._admitted = AdmittedNodes(socket, self._context, self.options.keys)
            socket.bind(self.options.bind)
        except BaseException as error:
            socket.close(0)
            self._end_context()
            if not isinstance(error, zmq.ZMQError):
                raise
            given = words(f"{self.options.bind}, which cannot be bound ({error})")
            raise InvalidInput(
                "speculative_config.drafter_nodes.bind", given, "a free address, tcp://HOST:PORT"
            ) from None
        self._socket, self.address = socket, socket.last_endpoint.decode().rstrip("\0")
        self._unread.watch(self._context, socket, self.address)
        threading.Thread(target=self._look, name="cospec-nodes", daemon=True).start()
        log.info("drafter nodes can join at %s", self.address)

    def _close(self) -> None:
        self._closed.set()
        with self.lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
                self._end_context()

    def _end_context(self) -> None:
        if self._admitted is not None:
            self._admitted.stop()
            self._admitted = None
        self._context.term()

    def _look(self) -> None:
        """Read between steps; ends with the socket."""
        while not self._closed.wait(LOOK_SECONDS):
            if self.lock.acquire(blocking=False):
                try:
                    self.attend(0.0)
                    self._look_after_nodes()
                finally:
                    self.lock.release()

    def _look_after_nodes(self) -> None:
        """Forget silent and removed nodes, and ask late nodes whether they answer again."""
        self._drop_removed()
        while self._unread.senders:
            self._exclude(*self._unread.senders.popleft(), "The peer sends a message without an end.")
        oldest = self.clock() - SILENT_SECONDS
        for identity, peer in list(self._peers.items()):
            if peer.link.last_message < oldest:
                log.warning("node %s has been silent for %.0f s", peer.link.hello.node, SILENT_SECONDS)
                self._drop(identity)
                continue
            probe = peer.link.probe()
            if probe is not None and not self.send(identity, probe) and not peer.link.gone:
                peer.link.unsent()

    def _drop_removed(self) -> None:
        """Forget nodes whose keys were removed from the folder, at most once in ``KEYS_SECONDS``."""
        if self._admitted is None or self.clock() < self._keys_at:
            return
        self._keys_at = self.clock() + KEYS_SECONDS
        for identity, peer in list(self._peers.items()):
            if not self._admitted.admits(peer.key):
                log.warning("the key of node %s was removed", peer.link.hello.node)
                self._drop(identity)

    def _read_all(self) -> None:
        zmq = zeromq()
        for _ in range(MOST_READ):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = parts[0].bytes
            key = identity.hex() if self._admitted is None else str(parts[-1].get("User-Id"))
            self._unread.read(parts, key)
            try:
                if len(parts) == 2:
                    self._take(identity, key, parts[1].bytes)
                elif identity in self._peers:
                    raise ProtocolError("The peer sent a message of several parts.")
            except ProtocolError as error:
                self._exclude(identity, key, str(error)[:LONGEST_REASON])
            except Exception as error:  # no peer may end the thread, or raise in the engine
                log.exception("a message of a peer cannot be handled")
                self._exclude(identity, key, f"A message causes {type(error).__name__}.", damaged=True)

    def _take(self, identity: bytes, key: str, frame: bytes) -> None:
        """Act on one frame of one connection.

        Raises:
            ProtocolError: the peer breaks the protocol.
        """
        peer = self._peers.get(identity)
        if peer is not None and peer.key != key:  # the identity belongs to a new connection
            self._drop(identity)
            peer = None
        if peer is None:
            self._greet(identity, key, frame)
            return
        link, message = peer.link, peer.link.decode(frame)
        match message:
            case NodeDrafts() | NodeScores() | NodeSteps():
                peer.slot.busy += link.answer(message)
            case NodeHeartbeat(waiting):
                link.waiting = waiting
            case NodeLeave():
                log.info("node %s leaves", link.hello.node)
                self._drop(identity)
            case NodeHello() if message != link.hello:
                raise ProtocolError("The node changes its offer.")
            case NodeHello():  # the node has not read ``Welcome`` yet; with ``Welcome`` the node forgets all requests
                link.lose()
                self._tell(identity, Welcome())
        if link.quarantine:
            raise ProtocolError(link.quarantine)

    def _greet(self, identity: bytes, key: str, frame: bytes) -> None:
        """Answer a connection without an accepted offer.

        Raises:
            ProtocolError: the peer breaks the protocol.
        """
        if self._key_records.excluded(key) or (self._admitted is not None and not self._admitted.admits(key)):
            return
        try:
            message = self._messages.decode(frame)
        except DamagedFrame:
            return
        if not isinstance(message, NodeHello):
            self._tell(identity, HelloRequest())
            return
        reason = self._why_not(message)
        if reason:
            log.warning("node %.80r is refused: %s", message.node, reason)
            self._tell(identity, Refused(reason, QUARANTINE_SECONDS))
            return
        self._accept(identity, key, message)

    def _accept(self, identity: bytes, key: str, hello: NodeHello) -> None:
        slot = self.slots[hello.drafter]
        times = ResponseTimes(self.options.quantile, self.options.deadline)
        link = NodeSession(hello, self.vocab_size, slot.samples and self.options.trusted, self.clock, times)
        link.last_message = self.clock()
        if self._key_records.pause(key):
            link.resume(self._key_records.pause(key))
        self._peers[identity] = Peer(key, slot, link)
        slot.links[identity] = link
        log.info("node %s drafts as %s", hello.node, hello.drafter)
        self._tell(identity, Welcome())

    def _why_not(self, hello: NodeHello) -> str:
        """Why an offer is refused; empty: the offer is accepted."""
        if not hello.node.isprintable() or not 0 < len(hello.node) <= LONGEST_NAME:
            return f"A node's name has 1 to {LONGEST_NAME} printable characters."
        slot = self.slots.get(hello.drafter)
        if slot is None:
            return f"Drafter {hello.drafter[:LONGEST_NAME]!r} is unknown; allowed is one of {', '.join(self.slots)}."
        if hello.method != slot.method:
            offered = hello.method[:LONGEST_NAME]
            return f"Drafter {slot.name!r} has the method {slot.method!r}; the node offers {offered!r}."
        if hello.vocab_size != self.vocab_size:
            return f"The target has {self.vocab_size} tokens; the node drafts for {hello.vocab_size} tokens."
        if not 0 <= hello.cost_per_hour < 1e6:
            return "The cost per hour is no number from 0 up."
        return "Too many nodes are connected." if len(self._peers) >= MOST_PEERS else ""

    def _exclude(self, identity: bytes, key: str, reason: str, damaged: bool = False) -> None:
        """Quarantine: tell the peer, and ignore its key for some time."""
        peer, status = self._peers.get(identity), None
        if peer is None:
            log.warning("a peer is refused: %s", reason)
        else:
            peer.link.counts.damaged += damaged
            if not peer.link.quarantine:
                peer.link.exclude(reason)
            status = _status(peer)
        self._tell(identity, Refused(reason, self._key_records.exclude(key, status)))
        self._drop(identity)

    def _tell(self, identity: bytes, message: NodeMessage) -> None:
        self.send(identity, self._messages.encode(message))

    def _drop(self, identity: bytes) -> None:
        """Forget a node; what it was asked for is lost."""
        peer = self._peers.pop(identity, None)
        if peer is None:
            return
        peer.link.gone = True
        peer.link.lose()
        peer.link.counts.ended += 1
        self._totals.end(_counted(peer))
        del peer.slot.links[identity]
        self._key_records.keep_pause(peer.key, peer.link.pause)


def _counted(peer: Peer) -> Counted:
    return peer.link.hello.node, peer.slot.name, {"busy_seconds": peer.link.busy, **asdict(peer.link.counts)}


def _status(peer: Peer) -> dict[str, Any]:
    link = peer.link
    return {
        "node": link.hello.node,
        "drafter": peer.slot.name,
        "method": peer.slot.method,
        "state": _state(link),
        "reason": link.quarantine,
        "cost_per_hour": link.hello.cost_per_hour,
        "load_seconds": link.load,
        "waiting": link.waiting,
        "busy_seconds": link.busy,
        "latency_seconds": link.times.mean,
        **asdict(link.counts),
    }


def _state(link: NodeSession) -> str:
    if link.quarantine:
        return "quarantined"
    return "ready" if link.usable else "late"
