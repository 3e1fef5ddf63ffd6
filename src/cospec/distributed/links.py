"""Links between stages: a channel, and delay, jitter, loss and bandwidth for tests and measurements.

A stage that sends does not wait for the link: a thread holds each message until the message is due.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from cospec.config import LinkConfig
from cospec.runtime.transport import Channel, ChannelClosed

RETRANSMISSION = 0.2  # seconds, the least time after which TCP sends lost bytes again
JOIN_SECONDS = 60.0  # for the neighbours of a stage, which all processes learn at the same time
MOST_STRANGERS = 64  # connections at a time that have not sent the token yet
GREETING_BYTES = 33  # a digest of the token, and what the connection is for


class Address(msgspec.Struct, frozen=True):
    """Where a stage listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Sized(Protocol):
    """A message that knows its size."""

    @property
    def num_bytes(self) -> int: ...


class LinkClock:
    """Computes when messages arrive over a link; later messages do not overtake earlier ones.

    Args:
        seed: of the jitter and the losses.
    """

    def __init__(self, config: LinkConfig, seed: int) -> None:
        self._config, self._random = config, random.Random(seed)
        self._sent = self._arrived = 0.0

    def arrival(self, now: float, num_bytes: int) -> float:
        """Return when a message of ``num_bytes``, given to the link ``now``, arrives; seconds of the same clock."""
        config, chance = self._config, self._random
        on_wire = 0.0 if config.bandwidth is None else num_bytes / config.bandwidth
        self._sent = max(now, self._sent) + on_wire
        delay = config.delay + config.jitter * chance.random()
        while config.loss and chance.random() < config.loss:
            delay += RETRANSMISSION + 2 * config.delay
        self._arrived = max(self._arrived, self._sent + delay)
        return self._arrived


class Link:
    """Sends messages to the next stage.

    Args:
        config: of the link; without any effect messages are sent at once.
        seed: see ``LinkClock``.
    """

    def __init__(self, channel: Channel, config: LinkConfig, seed: int = 0) -> None:
        self._channel, self._seed = channel, seed
        self._lost: ChannelClosed | None = None
        self._held: SimpleQueue[tuple[float, Sized]] | None = None
        self.change(config)

    def change(self, config: LinkConfig) -> None:
        """Change the link's delays; no message is on its way."""
        self.delay = config.delay
        self._clock = LinkClock(config, self._seed)
        if self._held is None and config != LinkConfig():
            self._held = SimpleQueue()
            threading.Thread(target=self._deliver, args=(self._held,), daemon=True).start()

    def send(self, message: Sized) -> None:
        """Send a message.

        Raises:
            ChannelClosed: the next stage is gone.
        """
        if self._lost is not None:
            raise self._lost
        if self._held is None:
            self._channel.send(message)
        else:
            self._held.put((self._clock.arrival(time.monotonic(), message.num_bytes), message))

    def _deliver(self, held: SimpleQueue[tuple[float, Sized]]) -> None:
        try:
            while True:
                moment, message = held.get()
                time.sleep(max(0.0, moment - time.monotonic()))
                self._channel.send(message)
        except ChannelClosed as error:
            self._lost = error


def listen(host: str) -> tuple[socket.socket, Address]:
    """Listen on a free port of an address of this machine."""
    listener = socket.create_server((host, 0))
    return listener, Address(host, listener.getsockname()[1])


def connect(address: Address, token: str, accepts: Any, results: bool = False) -> Channel:
    """Connect to a stage.

    Args:
        accepts: type of the messages that the stage sends.
        results: the connection takes results from the last stage, instead of giving windows.

    Raises:
        ChannelClosed: nothing listens there.
    """
    return Channel(greet(address, token, results), accepts)


def greet(address: Address, token: str, results: bool = False) -> socket.socket:
    """Connect and send the token, see ``connect``.

    Raises:
        ChannelClosed: nothing listens there.
    """
    try:
        stream = socket.create_connection((address.host, address.port), timeout=10.0)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(_greeting(token, results))
    except OSError as error:
        raise ChannelClosed(f"Nothing listens at {address}.") from error
    return stream


def accept(
    listener: socket.socket, token: str, accepts: Any, count: int = 1, seconds: float = JOIN_SECONDS
) -> list[tuple[Channel, bool]]:
    """Wait for ``count`` connections that know the token, and return them with ``results``, see ``connect``.

    Args:
        accepts: type of the messages that the peers send.

    Raises:
        ChannelClosed: fewer connections have come within ``seconds``.
    """
    found = [(Channel(stream, accepts), results) for stream, results in islice(admit(listener, token, seconds), count)]
    if len(found) < count:
        raise ChannelClosed(f"{len(found)} of {count} neighbours have connected within {seconds:g} s.")
    return found


def admit(listener: socket.socket, token: str, seconds: float | None = None) -> Iterator[tuple[socket.socket, bool]]:
    """Yield connections that know the token, with ``results``, see ``connect``, until ``seconds`` have passed.

    All connections are read at the same time. A stranger therefore delays no stage, and sends no byte to a decoder.
    """
    strangers, end = dict[socket.socket, bytes](), None if seconds is None else time.monotonic() + seconds
    listener.setblocking(False)
    try:
        while (left := None if end is None else end - time.monotonic()) is None or left > 0:
            ready, _, _ = select.select([listener, *strangers], [], [], left)
            for stream in ready:
                if stream is listener:
                    _open(listener, strangers)
                elif stream in strangers and _read(stream, strangers):
                    given = strangers.pop(stream)
                    for results in (False, True):
                        if hmac.compare_digest(given, _greeting(token, results)):
                            yield stream, results
                            break
                    else:
                        stream.close()
    finally:
        for stream in strangers:
            stream.close()


def _greeting(token: str, results: bool) -> bytes:
    """Return the first bytes of a connection, whose number does not depend on the token."""
    return hashlib.sha256(token.encode()).digest() + bytes([results])


def _open(listener: socket.socket, strangers: dict[socket.socket, bytes]) -> None:
    """Accept one connection; the oldest of too many connections is closed."""
    with contextlib.suppress(OSError):  # the peer is gone again
        stream, _ = listener.accept()
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers[stream] = b""
    if len(strangers) > MOST_STRANGERS:
        oldest = next(iter(strangers))
        del strangers[oldest]
        oldest.close()


def _read(stream: socket.socket, strangers: dict[socket.socket, bytes]) -> bool:
    """Read from a connection; returns whether the greeting is complete."""
    try:
        received = stream.recv(GREETING_BYTES - len(strangers[stream]))
    except OSError:
        received = b""
    if not received:
        del strangers[stream]
        stream.close()
        return False
    strangers[stream] += received
    return len(strangers[stream]) == GREETING_BYTES
