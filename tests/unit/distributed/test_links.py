"""Links: when messages arrive, who may connect, and what a window holds."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch

from cospec.config import LinkConfig
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.distributed.links import MOST_STRANGERS, RETRANSMISSION, Link, LinkClock, accept, connect, listen
from cospec.distributed.messages import Window, WindowOutput
from cospec.distributed.shard_sum import in_order
from cospec.models.stage import StageBatch
from cospec.runtime.codec import Codec
from cospec.runtime.messages import Hello
from cospec.runtime.transport import Channel, ChannelClosed

TREE = SequenceSlice("b", 3, (5, 6, 7), (-1, 0), 1)
BATCH = TokenBatch((SequenceSlice("a", 0, (1, 2, 3, 4), (), 3), TREE))
PAGES = {"a": [4, 9], "b": [0]}


def arrivals(config: LinkConfig, messages: int = 200, num_bytes: int = 1000) -> list[float]:
    """When messages arrive of which one is sent each millisecond."""
    clock = LinkClock(config, 7)
    return [clock.arrival(number / 1000, num_bytes) for number in range(messages)]


def test_a_link_without_delay_is_immediate() -> None:
    assert arrivals(LinkConfig()) == [number / 1000 for number in range(200)]


def test_delay_moves_all_messages_alike() -> None:
    assert arrivals(LinkConfig(delay=0.5)) == [number / 1000 + 0.5 for number in range(200)]


def test_jitter_keeps_the_order() -> None:
    found = arrivals(LinkConfig(delay=0.01, jitter=0.02))
    assert found == sorted(found)
    extra = [moment - number / 1000 - 0.01 for number, moment in enumerate(found)]
    assert min(extra) >= 0 and max(extra) <= 0.02 and len(set(extra)) > 20


def test_a_lost_message_is_late_and_holds_up_those_after() -> None:
    found = arrivals(LinkConfig(delay=0.01, loss=0.05))
    assert found == sorted(found)
    late = [moment - number / 1000 > RETRANSMISSION / 2 for number, moment in enumerate(found)]
    assert sum(late) > 0 and not all(late)


def test_bandwidth_spaces_messages() -> None:
    found = np.diff(arrivals(LinkConfig(bandwidth=1e5)))
    assert found == pytest.approx([0.01] * 199)


def test_equal_seeds_give_equal_delays() -> None:
    config = LinkConfig(delay=0.01, jitter=0.01, loss=0.1)
    assert arrivals(config) == arrivals(config)


def test_a_window_arrives_as_sent() -> None:
    batch = StageBatch.of(BATCH, PAGES.__getitem__)
    moves = np.array([3, 4]), np.array([1, 2])
    codec = Codec(Window)
    parts = [bytes(part) for part in codec.encode(Window.of(5, batch, moves))]
    window = codec.decode(parts)
    assert window.number == 5 and window.sources.tolist() == [3, 4] and window.targets.tolist() == [1, 2]
    tokens, tables = window.batch.unpack()
    assert tables == {"0": PAGES["a"], "1": PAGES["b"]}
    for found, wanted in zip(tokens.slices, BATCH.slices, strict=True):
        assert (found.start, found.tokens, found.parents, found.logits_from) == (
            wanted.start, wanted.tokens, wanted.parents, wanted.logits_from,
        )  # fmt: skip
    assert window.batch.logit_rows == 1 + 2


def test_a_stranger_cannot_join() -> None:
    listener, address = listen("127.0.0.1")
    with ThreadPoolExecutor(1) as waiting:
        joined = waiting.submit(accept, listener, "secret", Window)
        strange = socket.create_connection((address.host, address.port))
        strange.sendall(b"GET / HTTP/1.1\r\nHost: of some length\r\n\r\n")
        wrong = connect(address, "guess", Hello)
        right = connect(address, "secret", Hello)
        ((channel, results),) = joined.result(10)
    assert not results
    with pytest.raises(ChannelClosed):
        wrong.receive(5.0)
    right.send(Window.of(0, StageBatch.of(BATCH, PAGES.__getitem__), (np.zeros(0, np.int64), np.zeros(0, np.int64))))
    assert channel.receive(5.0).number == 0
    for each in (right, wrong, strange, listener, channel):
        each.close()


def test_silent_strangers_delay_no_neighbour() -> None:
    """More strangers than may wait at a time connect first, and half of them begin a greeting."""
    listener, address = listen("127.0.0.1")
    with ThreadPoolExecutor(1) as waiting:
        joined = waiting.submit(accept, listener, "secret", Window, 2)
        strangers = [socket.create_connection((address.host, address.port)) for _ in range(MOST_STRANGERS + 8)]
        for each in strangers[::2]:
            each.sendall(b"x")
        neighbours = [connect(address, "secret", Hello, results) for results in (True, False)]
        found = joined.result(10)
    assert [results for _, results in found] == [True, False]
    for stranger in strangers:
        stranger.settimeout(5.0)
        with suppress(ConnectionResetError):  # the system's answer to bytes that were not read
            assert stranger.recv(1) == b"", "a connection without the token is closed"
    for stream in (*strangers, listener):
        stream.close()
    for channel in (*neighbours, *(channel for channel, _ in found)):
        channel.close()


def test_waiting_for_neighbours_ends() -> None:
    """A stranger who is connected, and says nothing, does not count."""
    listener, address = listen("127.0.0.1")
    with (
        socket.create_connection((address.host, address.port)),
        pytest.raises(ChannelClosed, match="0 of 1 neighbours"),
    ):
        accept(listener, "secret", Window, seconds=0.2)
    listener.close()


def test_a_delayed_link_delivers_in_order() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, WindowOutput), Channel(theirs, WindowOutput)
    link = Link(sender, LinkConfig(delay=0.05, jitter=0.01))
    for number in range(5):
        link.send(WindowOutput(number))
    assert [receiver.receive(5.0).number for _ in range(5)] == list(range(5))
    link.change(LinkConfig())
    link.send(WindowOutput(5))
    assert receiver.receive(5.0).number == 5
    sender.close()
    receiver.close()


def test_shards_are_added_in_their_order() -> None:
    """Float32 sums depend on the order; another order has other bits here."""
    products = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    assert in_order(products).item() == 0.0
    assert in_order([products[0], products[2], products[1]]).item() == 1.0
    assert products[0].item() == 1e8
