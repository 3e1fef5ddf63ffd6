"""Links between stages: a channel, and delay, jitter, loss and bandwidth for tests and measurements.

A stage that sends does not wait for the link: a thread holds each message until the message is due.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from queue import SimpleQueue
from typing import Any, Protocol

from cospec.config import LinkConfig
from cospec.distributed.messages import Address, Join
from cospec.runtime.transport import Channel, ChannelClosed

RETRANSMISSION = 0.2  # seconds, the least time after which TCP sends lost bytes again


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

    Raises:
        ChannelClosed: nothing listens there.
    """
    try:
        stream = socket.create_connection((address.host, address.port), timeout=10.0)
    except OSError as error:
        raise ChannelClosed(f"Nothing listens at {address.host}:{address.port}.") from error
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(stream, accepts)
    channel.send(Join(token, results))
    return channel


def accept(listener: socket.socket, token: str, accepts: Any) -> tuple[Channel, bool]:
    """Wait for a connection that knows the token; others are closed. Returns ``Join.results`` too."""
    while True:
        stream, _ = listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(stream, accepts | Join)
        try:
            message = channel.receive(5.0)
        except Exception:  # a stranger may send anything, or nothing
            message = None
        if isinstance(message, Join) and secrets_equal(message.token, token):
            return channel, message.results
        channel.close()


def secrets_equal(given: str, token: str) -> bool:
    """Compare secrets in a time that does not depend on their contents."""
    import hmac

    return hmac.compare_digest(given.encode(), token.encode())
