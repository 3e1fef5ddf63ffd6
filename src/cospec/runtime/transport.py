"""How processes of the project reach each other: messages over a stream socket, and child processes with a socket.

Frame on the wire: a header (magic, number of buffers, bytes of the struct), the size of each buffer, the struct, the
buffers. Reads never block and never take bytes of the next frame. A readable socket therefore means a message.

A local child gets one end of a socket pair, which no other process can reach. The end of the stream means that
the process is dead: the system closes the sockets of a dead process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from cospec.runtime.codec import Codec, Part, ProtocolError
from cospec.runtime.messages import VERSION, Hello, check_version

MAGIC = b"cosp"
TIMEVAL = struct.Struct("@ll")  # of the system: seconds, microseconds
HEADER = struct.Struct("<4sIQ")
MAX_BYTES = 1 << 32  # of one message
MAX_BUFFERS = 1 << 16
MAX_PIECES = 512  # of one system call; Linux allows 1,024
END_SECONDS = 2.0  # for a process whose socket was closed
MAIN = "import sys; from {module} import main; main(sys.argv[1:])"


class ChannelClosed(ConnectionError):
    """The peer is dead, has closed the connection, or does not read."""


class FrameReader:
    """Cuts a stream of bytes into frames.

    Attributes:
        space: where the next bytes belong; never empty.

    Args:
        limit: bytes of the largest frame.
    """

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self._limit = limit
        self._frame: list[memoryview] | None = None
        self._steps = self._read()
        self.space = next(self._steps)

    def advance(self, count: int) -> list[memoryview] | None:
        """Note that ``count`` bytes were written into ``space``; returns the parts of a frame that is complete.

        Raises:
            ProtocolError: the bytes are no frame, or the frame is too large.
        """
        self.space = self.space[count:]
        if not len(self.space):
            self.space = next(self._steps)
        frame, self._frame = self._frame, None
        return frame

    def _read(self) -> Iterator[memoryview]:
        while True:
            header = bytearray(HEADER.size)
            yield memoryview(header)
            magic, count, size = HEADER.unpack(header)
            if magic != MAGIC or count > MAX_BUFFERS or not size:
                raise ProtocolError("The peer sent bytes that are no message.")
            self._check(size)
            head = memoryview(bytearray(8 * count + size))
            yield head
            sizes = struct.unpack(f"<{count}Q", head[: 8 * count])
            self._check(size + sum(sizes))
            buffers = [np.empty(each, np.uint8).data for each in sizes]
            yield from (buffer for buffer in buffers if len(buffer))
            self._frame = [head[8 * count :], *buffers]

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise ProtocolError(f"A message has {size} bytes; at most {self._limit} bytes are allowed.")


class MessageReader:
    """Cuts a stream of bytes into messages, of which the first one must name this version.

    Args:
        codec: decodes the messages.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec, self._frames, self._greeted = codec, FrameReader(), False

    @property
    def space(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self._frames.space

    def advance(self, count: int) -> Any:
        """Note that ``count`` bytes were written into ``space``; returns a message that is complete, otherwise None.

        Raises:
            ProtocolError: the peer speaks another version, or sent bytes that are no message.
        """
        parts = self._frames.advance(count)
        if parts is None:
            return None
        message = self._codec.decode(parts)
        if self._greeted:
            return message
        check_version(message)
        self._greeted = True
        return None


def frame(parts: Sequence[Part]) -> list[Part]:
    """The pieces that are to be written for the parts of a message.

    Raises:
        ProtocolError: the message is too large.
    """
    head, *buffers = parts
    size = sum(map(len, parts))
    if size > MAX_BYTES or len(buffers) > MAX_BUFFERS:
        raise ProtocolError(f"A message has {size} bytes; at most {MAX_BYTES} bytes are allowed.")
    sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    return [HEADER.pack(MAGIC, len(buffers), len(head)) + sizes + bytes(head), *filter(len, buffers)]


class Channel:
    """One end of a connection. One thread may send while another one receives.

    Args:
        stream: a connected stream socket, which the channel owns from now on.
        accepts: type of the messages that the peer sends.
        patience: seconds after which a peer that does not read counts as dead; None waits for ever.

    Attributes:
        received: bytes so far.
    """

    def __init__(self, stream: socket.socket, accepts: Any, patience: float | None = None) -> None:
        self.received = 0
        stream.setblocking(True)  # for sends, which the system finishes without waking this process for each piece
        if patience is not None:
            stream.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEVAL.pack(int(patience), int(patience % 1 * 1e6))
            )
        self._stream, self._patience = stream, patience
        self._codec = Codec(accepts | Hello)
        self._reader = MessageReader(self._codec)
        self._readable = select.poll()
        self._readable.register(stream, select.POLLIN)
        with contextlib.suppress(ChannelClosed):  # the next call finds out
            self.send(Hello(VERSION))

    def fileno(self) -> int:
        """The file descriptor; readable where a message, or the end of the connection, is there."""
        return self._stream.fileno()

    @property
    def closed(self) -> bool:
        """Whether this side has closed the connection."""
        return self._stream.fileno() < 0

    def send(self, message: Any) -> None:
        """Send a message, and wait while the peer is slow to read.

        Raises:
            ChannelClosed: the peer is gone, or did not read for ``patience`` seconds.
            ProtocolError, OverflowError, UnicodeEncodeError, TypeError: the message cannot be encoded.
        """
        pieces = [memoryview(piece) for piece in frame(self._codec.encode(message))]
        while pieces:
            try:
                sent = self._stream.sendmsg(pieces[:MAX_PIECES])
            except BlockingIOError:
                raise ChannelClosed(f"The peer has read nothing for {self._patience} seconds.") from None
            except OSError as error:
                raise ChannelClosed("The peer is gone.") from error
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether a message, or a part of a message, or the end of the connection comes within ``seconds``."""
        return bool(self._readable.poll(seconds * 1000))

    def receive(self, seconds: float | None = None) -> Any:
        """The next message; None where none is complete within ``seconds``. Without ``seconds`` waits for ever.

        Raises:
            ChannelClosed: the peer is gone, and all that it sent was received.
            ProtocolError: the peer speaks another version, or sent bytes that are no message.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                count = self._stream.recv_into(self._reader.space, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                left = None if end is None else end - time.monotonic()
                if (left is not None and left <= 0) or not self._readable.poll(None if left is None else left * 1000):
                    return None
                continue
            except OSError as error:
                raise ChannelClosed("The peer is gone.") from error
            if not count:
                raise ChannelClosed("The peer has closed the connection.")
            self.received += count
            message = self._reader.advance(count)
            if message is not None:
                return message

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()


class AsyncChannel(asyncio.BufferedProtocol):
    """One end of a connection in an asyncio program; the queue of outgoing messages has no limit.

    Args:
        accepts: type of the messages that the peer sends.
    """

    def __init__(self, accepts: Any) -> None:
        self._codec = Codec(accepts | Hello)
        self._reader = MessageReader(self._codec)
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def connect(cls, stream: socket.socket, accepts: Any) -> AsyncChannel:
        """Take over a connected stream socket."""
        channel = cls(accepts)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=stream)
        channel.send(Hello(VERSION))
        return channel

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, for whatever reason."""
        return self._transport is None

    def send(self, message: Any) -> None:
        """Queue a message; a message to a dead peer is lost.

        Raises:
            ProtocolError, OverflowError, UnicodeEncodeError, TypeError: the message cannot be encoded.
        """
        pieces = frame(self._codec.encode(message))
        if self._transport is not None:
            self._transport.writelines(pieces)

    async def messages(self) -> AsyncIterator[Any]:
        """All that the peer sends, until the connection ends.

        Raises:
            ProtocolError: the peer speaks another version, or sent bytes that are no message.
        """
        while (message := await self._messages.get()) is not None:
            if isinstance(message, ProtocolError):
                raise message
            yield message

    def close(self) -> None:
        """Close the connection; what is still queued is lost."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of ``asyncio.BufferedProtocol``."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports have another base class

    def get_buffer(self, sizehint: int) -> memoryview:
        """Part of ``asyncio.BufferedProtocol``."""
        return self._reader.space

    def buffer_updated(self, nbytes: int) -> None:
        """Part of ``asyncio.BufferedProtocol``."""
        try:
            message = self._reader.advance(nbytes)
        except ProtocolError as error:
            self._messages.put_nowait(error)
            self.close()
            return
        if message is not None:
            self._messages.put_nowait(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of ``asyncio.BufferedProtocol``."""
        self._transport = None
        self._messages.put_nowait(None)


class ChildProcess:
    """A new Python process that ends with its parent, and one end of the connection to the process.

    Attributes:
        stream: this side's end, for a ``Channel`` or an ``AsyncChannel``.

    Args:
        module: its function ``main`` is called with the file descriptor of the other end, then ``arguments``.
        files: descriptors that the process inherits.
        before: words before the command, such as those that enter a network namespace.
    """

    def __init__(
        self, module: str, arguments: Iterable[str] = (), files: Iterable[int] = (), before: Iterable[str] = ()
    ) -> None:
        self.stream, theirs = socket.socketpair()
        command = [*before, sys.executable, "-P", "-c", MAIN.format(module=module), str(theirs.fileno()), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno(), *files], env=environment)
        self._finalizer = weakref.finalize(self, _end, self._process, self.stream)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def wait(self, seconds: float) -> bool:
        """Whether the process ends within ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.running

    def kill(self) -> None:
        """End the process by force, whatever state it is in."""
        self._process.kill()

    def ending(self) -> str:
        """How a process ended whose connection is closed, as the predicate of a sentence."""
        if not self.wait(END_SECONDS):
            return "has closed its connection"
        code = self._process.returncode
        return f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"

    def close(self) -> None:
        """Close the connection, give the process ``END_SECONDS`` to end, then kill the process."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes], stream: socket.socket) -> None:
    stream.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def inherited(descriptor: str) -> socket.socket:
    """The child's end of the connection. The parent decides when its child ends, so signals to the group do nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return socket.socket(fileno=int(descriptor))
