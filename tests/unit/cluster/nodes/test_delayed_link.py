"""A delayed link: when frames arrive, in which order, and that a node over the link drafts as before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cospec.cluster.nodes.delayed_link import DelayedLink
from cospec.config import LinkConfig

zmq = pytest.importorskip("zmq", reason="the extra cluster is not installed")
FRAMES = [bytes([number]) for number in range(20)]


@contextmanager
def linked(config: LinkConfig) -> Iterator[tuple[Any, DelayedLink]]:
    """The verifier's socket, and the link of a node."""
    context = zmq.Context()
    verifier, node = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    verifier.linger = node.linger = 0
    verifier.rcvtimeo = 5000
    node.connect(f"tcp://127.0.0.1:{verifier.bind_to_random_port('tcp://127.0.0.1')}")
    link = DelayedLink(context, node, config)
    link.inside.rcvtimeo = 5000
    yield verifier, link
    link.inside.close(0)
    verifier.close(0)
    context.term()  # hangs where the link's thread keeps a socket


@pytest.mark.parametrize("config", [LinkConfig(delay=0.05), LinkConfig(delay=0.02, jitter=0.05, loss=0.1)])
def test_frames_of_both_directions_arrive_late_and_in_order(config: LinkConfig) -> None:
    with linked(config) as (verifier, link):
        node = link.inside
        started = time.monotonic()
        for frame in FRAMES:
            node.send(frame)
        identity, first = verifier.recv_multipart()
        there = time.monotonic() - started
        assert [first, *(verifier.recv_multipart()[1] for _ in FRAMES[1:])] == FRAMES
        started = time.monotonic()
        for frame in FRAMES:
            verifier.send_multipart((identity, frame))
        back = [node.recv(), time.monotonic() - started]
        assert [back[0], *(node.recv() for _ in FRAMES[1:])] == FRAMES
        link.end()
    assert config.delay <= there < config.delay + 10 and config.delay <= back[1] < config.delay + 10


def test_the_last_frames_of_a_node_still_arrive() -> None:
    with linked(LinkConfig(delay=0.1)) as (verifier, link):
        link.inside.send(b"leave")
        link.end()
        assert verifier.recv_multipart()[1] == b"leave"
