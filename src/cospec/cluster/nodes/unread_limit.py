"""A limit on unfinished messages: a connection with too many unread bytes is cut.

libzmq bounds one part of a message, and holds any number of parts until the last part arrives. A part of an encrypted
message does not show whether another follows. So this thread compares the bytes that the kernel received for each
connection with the bytes of the messages that the hub read. An empty part has 2 bytes and takes 64 bytes in libzmq, so
memory is bounded by 32 times the limits below.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cospec.cluster.nodes.hub_options import zeromq
from cospec.cluster.nodes.wire import MAX_BYTES

MOST_UNREAD = 2 * MAX_BYTES  # bytes of one connection
MOST_UNREAD_TOGETHER = 8 * MAX_BYTES  # bytes of all connections, after which the connection with most is cut
MESSAGE_OVERHEAD = 256  # bytes of frames, encryption and heartbeats around one message, or more
COMPARE_SECONDS = 0.02  # between two comparisons
AT_ONCE = struct.pack("ii", 1, 0)
RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in Linux's struct tcp_info (linux/tcp.h)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Connection:
    """One accepted TCP connection.

    Attributes:
        socket: a duplicate of libzmq's descriptor, for the kernel's count and for the cut.
        read: bytes of messages that the hub read; the hub's thread writes this field.
        sender: identity and user of the latest message; empty before the first message.
        unread: bytes that arrived after the messages that the hub read.
    """

    socket: socket.socket
    read: int = 0
    sender: tuple[bytes, str] | tuple[()] = ()
    unread: int = 0
    cut: bool = False
    _read_before: int = 0
    _received_before: int = 0

    def compare(self) -> None:
        """Update ``unread``."""
        read = self.read  # before the count of the kernel, which then has all of these bytes
        (received,) = RECEIVED.unpack(self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size))
        arrived = received - self._received_before - (read - self._read_before)
        self.unread = max(0, self.unread + arrived)
        self._read_before, self._received_before = read, received


class UnreadLimit:
    """Watches the connections of a listening ZeroMQ socket.

    Attributes:
        senders: identity and user of connections that were cut.
    """

    def __init__(self) -> None:
        self.senders: deque[tuple[bytes, str]] = deque()
        self._connections: dict[int, Connection] = {}  # by libzmq's descriptor
        self._port: int | None = None

    def watch(self, context: Any, listener: Any, address: str) -> None:
        """Start a thread that ends with the socket, which listens at ``address``."""
        zmq = zeromq()
        self._port = int(address.rpartition(":")[2]) if address.startswith("tcp://") else None
        if not hasattr(socket, "TCP_INFO") or self._port is None:
            log.warning("memory of unfinished messages is limited at TCP addresses on Linux only")
            return
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        listener.monitor("inproc://connections", events)
        monitor = context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.connect("inproc://connections")
        threading.Thread(target=self._watch, args=(monitor,), name="cospec-node-memory", daemon=True).start()

    def read(self, parts: Sequence[Any], user: str) -> None:
        """Note that the hub read a message: identity and frames."""
        try:
            connection = self._connections.get(parts[-1].get(zeromq().SRCFD))
        except zeromq().ZMQError:  # no connection over TCP
            return
        if connection is not None:
            connection.sender = parts[0].bytes, user
            connection.read += MESSAGE_OVERHEAD + sum([len(part) for part in parts[1:]])

    def _watch(self, monitor: Any) -> None:
        zmq = zeromq()
        try:
            while True:
                while monitor.poll(round(1000 * COMPARE_SECONDS) if self._connections else None):
                    if not self._note(monitor):
                        return
                self._compare()
        except zmq.ContextTerminated:
            return
        finally:
            while self._connections:
                self._connections.popitem()[1].socket.close()
            monitor.close()

    def _note(self, monitor: Any) -> bool:
        """Follow one event of the listening socket; False after its end."""
        from zmq.utils.monitor import recv_monitor_message

        zmq, event = zeromq(), recv_monitor_message(monitor)
        descriptor = int(event["value"])
        if event["event"] == zmq.EVENT_MONITOR_STOPPED:
            return False
        before = self._connections.pop(descriptor, None)
        if before is not None:
            before.socket.close()
        if event["event"] == zmq.EVENT_ACCEPTED:
            with suppress(OSError):  # the connection has ended
                own = socket.socket(fileno=os.dup(descriptor))
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] == self._port:
                    self._connections[descriptor] = Connection(own)
                else:  # libzmq closed the descriptor, and another file has its number
                    own.close()
        return True

    def _compare(self) -> None:
        counted = [each for each in self._connections.values() if not each.cut]
        for connection in counted:
            connection.compare()
            if connection.unread > MOST_UNREAD:
                self._cut(connection)
        counted = [each for each in counted if not each.cut]
        if sum([each.unread for each in counted]) > MOST_UNREAD_TOGETHER:
            self._cut(max(counted, key=lambda each: each.unread))

    def _cut(self, connection: Connection) -> None:
        """End a connection; libzmq then frees its unfinished message."""
        connection.cut = True
        with suppress(OSError):  # the connection has ended
            log.warning(
                "a peer at %s is cut off: %d MB are no whole message",
                connection.socket.getpeername()[0],
                connection.unread // 1_000_000,
            )
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)  # frees the kernel's memory
            connection.socket.shutdown(socket.SHUT_RDWR)
        if connection.sender:
            self.senders.append(connection.sender)
