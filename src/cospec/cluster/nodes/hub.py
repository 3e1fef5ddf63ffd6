"""The verifier's socket: every drafter node connects to this one address.

The engine's thread sends and receives by itself while it waits for drafts, so a round needs no switch of threads.
Between rounds a background thread reads what nodes say: offers, beats, late answers. One lock guards both.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from cospec.cluster.nodes.deadline import ResponseTimes
from cospec.cluster.nodes.hub_options import NodesOptions, check_address, zeromq
from cospec.cluster.nodes.keys import secure_verifier
from cospec.cluster.nodes.node_session import NodeSession
from cospec.cluster.nodes.wire import (
    LONGEST_NAME,
    MAX_BYTES,
    DamagedFrame,
    FrameCodec,
    HelloAgain,
    NodeBeat,
    NodeDrafts,
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

BIND = "speculative_config.drafter_nodes.bind"
LOOK_SECONDS = 0.02  # between two looks of the background thread
SILENT_SECONDS = 5.0  # after which a node without a word counts as gone
QUARANTINE_SECONDS = 60.0  # doubled for each time that the same key or address broke the protocol
MOST_READ = 256  # messages of one look, so that a peer that floods the socket cannot hold the engine
MOST_PEERS = 256  # connections without an accepted offer that are remembered

log = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeSlot:
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


class NodeHub:
    """Connects drafters of the configuration with nodes. Opens its socket with the first drafter.

    Args:
        vocab_size: of the target.
    """

    def __init__(self, options: NodesOptions, vocab_size: int, clock: Clock = time.monotonic) -> None:
        self.options, self.vocab_size, self.clock = options, vocab_size, clock
        self.slots: dict[str, NodeSlot] = {}
        self.address = ""
        self._links: dict[bytes, tuple[NodeSlot, NodeSession]] = {}
        self._banned: dict[str, tuple[int, float]] = {}  # how often, and until when, by user
        self._users: dict[bytes, str] = {}  # the authenticated user of a connection
        self._socket: Any = None
        self._context: Any = None
        self._authenticator: Any = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._messages = FrameCodec(ToVerifier)
        self._excluded: dict[str, tuple[float, dict[str, Any]]] = {}  # the last status of users in quarantine

    def add(self, name: str, method: str, samples: bool) -> NodeSlot:
        """Let nodes offer a drafter of that name.

        Raises:
            InvalidInput: the address cannot be bound, or is not allowed without keys.
            CospecError: ZeroMQ is missing.
        """
        with self._lock:
            self._open()
            slot = self.slots[name] = NodeSlot(name, method, samples)
        return slot

    def remove(self, slot: NodeSlot) -> None:
        """No node may offer the drafter any more. The socket closes with the last drafter."""
        with self._lock:
            if self.slots.get(slot.name) is not slot:
                return
            del self.slots[slot.name]
            for identity, link in list(slot.links.items()):
                self._tell(identity, HelloAgain())
                self._drop(identity, link)
        if not self.slots:
            self._close()

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Whether a frame left for a node. A node that is gone, or does not read, gets nothing."""
        zmq = zeromq()
        with self._lock:
            if self._socket is None:
                return False
            try:
                self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
            except zmq.Again:
                return False  # the node does not read
            except zmq.ZMQError:
                slot, link = self._links.get(identity, (None, None))
                if slot is not None and link is not None:
                    log.warning("node %s is gone", link.hello.node)
                    self._drop(identity, link)
                return False
        return True

    def attend(self, seconds: float) -> None:
        """Read what nodes say: wait up to ``seconds`` for the first message, then take all that are there."""
        with self._lock:
            if self._socket is None:
                return
            if self._socket.poll(max(0, round(seconds * 1000 + 0.499))):
                self._read_all()

    def status(self) -> list[dict[str, Any]]:
        """One object per node: what it offers, its load, times and counts."""
        with self._lock:
            now = self.clock()
            excluded = [row for until, row in self._excluded.values() if now < until]
            return [*(_status(slot, link) for slot, link in self._links.values()), *excluded]

    def _open(self) -> None:
        if self._socket is not None:
            return
        zmq = zeromq()
        check_address(BIND, self.options.bind, self.options.keys)
        self._closed.clear()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.linger, socket.maxmsgsize = 100, MAX_BYTES
        socket.router_mandatory, socket.sndhwm, socket.rcvhwm = True, 64, 32
        socket.heartbeat_ivl, socket.heartbeat_timeout = 1000, 5000
        try:
            if self.options.keys is not None:
                self._authenticator = secure_verifier(socket, self._context, self.options.keys)
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
        threading.Thread(target=self._look, name="cospec-nodes", daemon=True).start()
        log.info("drafter nodes can join at %s", self.address)

    def _close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
                self._end_context()

    def _end_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()

    def _look(self) -> None:
        """Read between rounds; ends with the socket."""
        while not self._closed.wait(LOOK_SECONDS):
            if self._lock.acquire(blocking=False):
                try:
                    self.attend(0.0)
                    self._drop_silent()
                finally:
                    self._lock.release()

    def _drop_silent(self) -> None:
        oldest = self.clock() - SILENT_SECONDS
        for identity, (_, link) in list(self._links.items()):
            if link.heard < oldest and not link.quarantine:
                log.warning("node %s has been silent for %.0f s", link.hello.node, SILENT_SECONDS)
                self._drop(identity, link)

    def _read_all(self) -> None:
        zmq = zeromq()
        for _ in range(MOST_READ):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = parts[0].bytes
            if len(parts) == 2:
                self._users[identity] = _user(parts[1]) if self._authenticator is not None else identity.hex()
                self._take(identity, parts[1].bytes)
            elif identity in self._links:
                self._exclude(identity, "The peer sent a message of several parts.")

    def _take(self, identity: bytes, frame: bytes) -> None:
        """Act on one frame of one connection."""
        slot, link = self._links.get(identity, (None, None))
        if slot is None or link is None:
            self._greet(identity, frame)
            return
        message = link.decode(frame)
        match message:
            case NodeDrafts() | NodeScores() | NodeSteps():
                slot.busy += link.answer(message)
            case NodeBeat(waiting):
                link.waiting = waiting
            case NodeLeave():
                log.info("node %s leaves", link.hello.node)
                self._drop(identity, link)
            case NodeHello():
                self._drop(identity, link)
                self._greet(identity, frame)
        if link.quarantine:
            self._exclude(identity, link.quarantine)

    def _greet(self, identity: bytes, frame: bytes) -> None:
        """Answer a connection without an accepted offer."""
        user = self._users[identity]
        if self.clock() < self._banned.get(user, (0, 0.0))[1]:
            self._users.pop(identity)
            return
        try:
            message = self._messages.decode(frame)
        except DamagedFrame:
            self._users.pop(identity)
            return
        except ProtocolError as error:
            self._users.pop(identity)
            self._ban(user)
            self._tell(identity, Refused(str(error), QUARANTINE_SECONDS))
            log.warning("a peer is refused: %s", error)
            return
        if not isinstance(message, NodeHello):
            self._users.pop(identity)
            self._tell(identity, HelloAgain())
            return
        reason = self._why_not(message)
        if reason:
            self._users.pop(identity)
            log.warning("node %.80r is refused: %s", message.node, reason)
            self._tell(identity, Refused(reason, QUARANTINE_SECONDS))
            return
        self._accept(identity, message)

    def _accept(self, identity: bytes, hello: NodeHello) -> None:
        slot = self.slots[hello.drafter]
        times = ResponseTimes(self.options.quantile, self.options.deadline)
        link = NodeSession(hello, self.vocab_size, slot.samples and self.options.trusted, self.clock, times)
        link.heard = self.clock()
        self._links[identity] = slot, link
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
        return "Too many nodes are connected." if len(self._links) >= MOST_PEERS else ""

    def _exclude(self, identity: bytes, reason: str) -> None:
        """Quarantine: tell the node, and ignore its user for some time."""
        _, link = self._links[identity]
        if not link.quarantine:
            link.exclude(reason)
        user = self._users.get(identity, "")
        seconds = self._ban(user)
        self._excluded[user] = self.clock() + seconds, _status(self._links[identity][0], link)
        self._tell(identity, Refused(reason, seconds))
        self._drop(identity, link)

    def _ban(self, user: str) -> float:
        times, _ = self._banned.get(user, (0, 0.0))
        now = self.clock()
        if len(self._banned) >= MOST_PEERS:
            self._banned = {user: ban for user, ban in self._banned.items() if now < ban[1]}
            self._excluded = {user: row for user, row in self._excluded.items() if now < row[0]}
        seconds = QUARANTINE_SECONDS * float(1 << min(times, 6))
        self._banned[user] = times + 1, now + seconds
        return seconds

    def _tell(self, identity: bytes, message: NodeMessage) -> None:
        self.send(identity, self._messages.encode(message))

    def _drop(self, identity: bytes, link: NodeSession) -> None:
        """Forget a node; what it was asked for is lost."""
        if link.gone:
            return
        link.gone = True
        link.lose()
        slot, _ = self._links.pop(identity)
        slot.links.pop(identity)
        self._users.pop(identity, None)


def _user(frame: Any) -> str:
    """The public key of an authenticated peer."""
    return str(frame.get("User-Id"))


def _status(slot: NodeSlot, link: NodeSession) -> dict[str, Any]:
    return {
        "node": link.hello.node,
        "drafter": slot.name,
        "method": slot.method,
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
