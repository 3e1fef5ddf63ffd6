"""Channels: partial messages, large ones, a peer that is gone, silent, of another version or no peer at all."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from cospec.core.types import Draft
from cospec.runtime.codec import Codec, ProtocolError
from cospec.runtime.messages import (
    VERSION,
    Abort,
    DrafterCommand,
    DrafterReply,
    Drafts,
    EngineCommand,
    EngineReply,
    Failed,
    Free,
    Hello,
    Measure,
)
from cospec.runtime.transport import HEADER, AsyncChannel, Channel, ChannelClosed, FrameReader, frame


def bytes_of(message: Any) -> bytes:
    return b"".join(frame(Codec(type(message)).encode(message)))


def pair(patience: float | None = None) -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours, DrafterReply, patience), Channel(theirs, DrafterCommand, patience)


def test_messages_arrive_in_order_and_none_comes_from_nothing() -> None:
    engine, drafter = pair()
    assert drafter.receive(0) is None and drafter.receive(0.01) is None
    for number in range(100):
        engine.send(Free([str(number)]))
    assert drafter.poll()
    assert [drafter.receive(1).ids[0] for _ in range(100)] == [str(number) for number in range(100)]
    assert not drafter.poll() and drafter.receive(0) is None
    engine.close()
    assert engine.closed and drafter.poll(1)
    with pytest.raises(ChannelClosed):
        drafter.receive()
    with pytest.raises(ChannelClosed):
        drafter.send(Drafts(1, [], 0.0))


def test_a_message_larger_than_the_buffers_of_the_system() -> None:
    engine, drafter = pair()
    q = np.random.default_rng(0).random((4, 500_000))
    drafts = [Draft("s", 1, (1,) * 4, (-1, 0, 1, 2), ("d",) * 4, q)] * 2
    sender = threading.Thread(target=drafter.send, args=(Drafts(1, drafts, 0.0),))
    sender.start()
    found = engine.receive(30).drafts
    sender.join()
    assert all(np.array_equal(one.q, q) for one in found)


def test_half_a_message_is_kept_until_the_rest_comes() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, DrafterCommand)
    for byte in bytes_of(Hello(VERSION)) + bytes_of(Free(["a"])):
        assert channel.receive(0) is None
        theirs.send(bytes([byte]))
    assert channel.receive(0).ids == ["a"]


def test_a_peer_that_does_not_read_counts_as_gone() -> None:
    engine, _ = pair(patience=0.2)
    started = time.monotonic()
    with pytest.raises(ChannelClosed, match=r"read nothing for 0\.2 seconds"):
        engine.send(Free(["x" * (1 << 24)]))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (bytes_of(Hello(VERSION + 1)), f"peer speaks version {VERSION + 1} .*this process speaks version {VERSION}"),
        (bytes_of(Free(["a"])), "another message than Hello"),
        (b"GET / HTTP/1.1\r\n\r\n", "bytes that are no message"),
        (HEADER.pack(b"cosp", 0, 1 << 60), "at most"),
        (HEADER.pack(b"cosp", 1 << 31, 10), "bytes that are no message"),
        (HEADER.pack(b"cosp", 0, 0), "bytes that are no message"),
        (HEADER.pack(b"cosp", 1, 1) + (1 << 62).to_bytes(8, "little") + b"\xc0", "at most"),
    ],
)
def test_a_peer_of_another_kind_is_refused(sent: bytes, expected: str) -> None:
    ours, theirs = socket.socketpair()
    theirs.send(sent)
    with pytest.raises(ProtocolError, match=expected):
        Channel(ours, DrafterCommand).receive(1)

    async def use() -> None:
        ours, theirs = socket.socketpair()
        theirs.send(sent)
        channel = await AsyncChannel.connect(ours, DrafterCommand)
        with pytest.raises(ProtocolError, match=expected):
            await anext(channel.messages())
        await asyncio.sleep(0)
        assert channel.closed

    asyncio.run(use())


def test_random_bytes_never_do_anything_but_raise() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        reader, data = FrameReader(limit=1 << 16), rng.bytes(200)
        if rng.random() < 0.5:
            data = HEADER.pack(b"cosp", int(rng.integers(3)), int(rng.integers(1, 50))) + data
        try:
            while data:
                count = min(len(reader.space), len(data))
                reader.space[:count] = data[:count]
                data = data[count:]
                parts = reader.advance(count)
                if parts is not None:
                    Codec(DrafterCommand).decode(parts)
        except ProtocolError:
            continue


def test_an_asyncio_program_sends_and_receives() -> None:
    async def use() -> None:
        ours, theirs = socket.socketpair()
        server, engine = await AsyncChannel.connect(ours, EngineReply), Channel(theirs, EngineCommand)
        server.send(Abort(("a",)))
        server.send(Measure())
        for expected in (Abort(("a",)), Measure()):
            assert await asyncio.to_thread(engine.receive, 10) == expected
        with pytest.raises(UnicodeEncodeError):
            server.send(Abort(("\ud800",)))
        engine.send(Failed("one"))
        engine.send(Failed("two"))
        engine.close()
        assert [reply.message async for reply in server.messages()] == ["one", "two"], "the last messages arrive"
        assert server.closed
        server.send(Measure())  # a message to a dead peer is lost

    asyncio.run(use())
