"""Delay, jitter, loss and bandwidth of the link between a node and its verifier, for tests and measurements.

The node talks to a thread of its own process, which holds each frame until the frame is due. So a node that drafts
sends answers in time, as a network card does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from cospec.cluster.nodes.hub_options import zeromq
from cospec.config import LinkConfig
from cospec.distributed.links import LinkClock

END = b""  # the last frame from the node
LOOK_SECONDS = 1.0
TICK = 0.001  # seconds, the resolution of ZeroMQ's waiting
LINGER = 200  # milliseconds for the last frames


class DelayedLink:
    """Passes frames between a node and its verifier.

    Args:
        outside: the node's socket to the verifier, which the link owns from now on.
        config: of the link, in each direction.

    Attributes:
        inside: the socket that the node uses in place of ``outside``.
    """

    def __init__(self, context: Any, outside: Any, config: LinkConfig) -> None:
        zmq = zeromq()
        near, self.inside = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        address = f"inproc://link-{id(self)}"
        near.bind(address)
        self.inside.connect(address)
        self._thread = threading.Thread(target=_pass_frames, args=(near, outside, config), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send what the node has given to the link, and end the link. The context can then be terminated."""
        self.inside.send(END)
        self._thread.join()


def _pass_frames(near: Any, outside: Any, config: LinkConfig) -> None:
    """Pass frames in both directions until the node ends the link."""
    zmq = zeromq()
    held = {near: _Held(LinkClock(config, 2 * config.seed)), outside: _Held(LinkClock(config, 2 * config.seed + 1))}
    poller, ended = zmq.Poller(), False
    for socket in held:
        poller.register(socket, zmq.POLLIN)
    while not ended or held[outside].frames:
        wait = min(each.wait() for each in held.values())
        if wait < TICK:
            time.sleep(wait)
        for socket, _ in poller.poll(int(wait / TICK)):
            for frame in _received(socket):
                if frame == END:
                    ended = True
                else:
                    held[outside if socket is near else near].put(frame)
        for socket, each in held.items():
            for frame in each.due():
                with suppress(zmq.Again):  # the verifier is not there
                    socket.send(frame, zmq.NOBLOCK)
    for socket in held:
        socket.close(LINGER)


def _received(socket: Any) -> Iterator[bytes]:
    """Yield the frames that are there. A socket whose peer has gone can be readable without a frame."""
    zmq = zeromq()
    with suppress(zmq.Again):
        while True:
            yield b"".join(socket.recv_multipart(zmq.NOBLOCK))


class _Held:
    """The frames of one direction that are on their way.

    Attributes:
        frames: when each frame arrives, and the frame.
    """

    def __init__(self, clock: LinkClock) -> None:
        self.frames: deque[tuple[float, bytes]] = deque()
        self._clock = clock

    def put(self, frame: bytes) -> None:
        """Take a frame that is sent now."""
        self.frames.append((self._clock.arrival(time.monotonic(), len(frame)), frame))

    def wait(self) -> float:
        """Return the seconds until the next frame arrives, at most ``LOOK_SECONDS``."""
        if not self.frames:
            return LOOK_SECONDS
        return min(LOOK_SECONDS, max(0.0, self.frames[0][0] - time.monotonic()))

    def due(self) -> list[bytes]:
        """Return the frames that have arrived."""
        found = []
        while self.frames and self.frames[0][0] <= time.monotonic():
            found.append(self.frames.popleft()[1])
        return found
