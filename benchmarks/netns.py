"""Network namespaces on this machine, joined by a relay with slow links. Needs root and /dev/net/tun.

Run ``python -m benchmarks.netns --nodes 4 --delay 0.01 -- python -m benchmarks.dsd --namespaces 4``. The command runs
in the first namespace. Node ``n`` has the address ``10.77.0.(n + 1)``. Namespaces and devices go with the relay.

Delay, jitter, loss and bandwidth hold for each direction of all links. ``--link 0:1 '{"delay": 0.1}'`` gives the
packets from node 0 to node 1 a link of their own. Packets keep their order, and lost packets are dropped.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import os
import random
import select
import shlex
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.common import RUNS_UNDER, command
from cospec.config import LinkConfig
from cospec.distributed.links import LinkClock

SET_INTERFACE = 0x400454CA  # TUNSETIFF of linux/if_tun.h
TUN_WITHOUT_HEADER = 0x1001  # IFF_TUN | IFF_NO_PI
PACKET = 65536
BURST = 64  # packets of one device in a turn


def namespace(node: int) -> str:
    """Return the name of a node's namespace."""
    return f"cospec{node}"


def address(node: int) -> str:
    """Return the address of a node."""
    return f"10.77.0.{node + 1}"


def device(node: int) -> str:
    """Return the name of a node's TUN device."""
    return f"cospec-tun{node}"


def inside(node: int) -> list[str]:
    """Return the words before a command that runs in a node's namespace."""
    return ["ip", "netns", "exec", namespace(node)]


def _shell(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, capture_output=not check)


def _device(node: int) -> int:
    """Make a namespace with a TUN device; returns the device's descriptor."""
    name, space = device(node), namespace(node)
    _shell("ip", "netns", "del", space, check=False)
    _shell("ip", "netns", "add", space)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, SET_INTERFACE, struct.pack("16sH", name.encode(), TUN_WITHOUT_HEADER))
    _shell("ip", "link", "set", name, "netns", space)
    for words in (
        ["ip", "link", "set", "lo", "up"],
        ["ip", "addr", "add", f"{address(node)}/24", "dev", name],
        ["ip", "link", "set", name, "mtu", "9000", "up"],
    ):
        _shell(*inside(node), *words)
    return descriptor


@dataclass
class Direction:
    """The link from one node to another: when packets arrive, and which are lost."""

    config: LinkConfig
    seed: int
    _clock: LinkClock = field(init=False)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._clock = LinkClock(self.config.model_copy(update={"loss": 0.0}), self.seed)
        self._random = random.Random(self.seed)

    def arrival(self, now: float, num_bytes: int) -> float | None:
        """Return when a packet that starts ``now`` arrives; None for a lost packet."""
        arrival = self._clock.arrival(now, num_bytes)
        return None if self._random.random() < self.config.loss else arrival


class Relay:
    """Passes packets between namespaces.

    Args:
        link: of all pairs of nodes, in each direction.
        links: by sender and receiver, where other.
    """

    def __init__(self, nodes: int, link: LinkConfig, links: Mapping[tuple[int, int], LinkConfig]) -> None:
        self._links = {
            (a, b): Direction(links.get((a, b), link), link.seed * nodes**2 + a * nodes + b)
            for a in range(nodes)
            for b in range(nodes)
        }
        self._devices = [_device(node) for node in range(nodes)]
        self._ending = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End the relay and remove the namespaces."""
        self._ending = True
        self._thread.join()
        for node, descriptor in enumerate(self._devices):
            os.close(descriptor)
            _shell("ip", "netns", "del", namespace(node), check=False)

    def _run(self) -> None:
        poll = select.poll()
        senders = {descriptor: node for node, descriptor in enumerate(self._devices)}
        for each in self._devices:
            poll.register(each, select.POLLIN)
        held: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._ending:
            now = time.monotonic()
            while held and held[0][0] <= now:
                _, _, device, packet = heapq.heappop(held)
                os.write(device, packet)
            left = held[0][0] - time.monotonic() if held else 0.05
            for descriptor, _ in poll.poll(max(0.0, left) * 1000 if left > 0.001 else 0):
                for packet in _packets(descriptor):
                    receiver = _receiver(packet)
                    if (link := self._links.get((senders[descriptor], receiver))) is None:
                        continue
                    if (arrival := link.arrival(time.monotonic(), len(packet))) is not None:
                        number += 1
                        heapq.heappush(held, (arrival, number, self._devices[receiver], packet))


def _packets(descriptor: int) -> list[bytes]:
    found = []
    for _ in range(BURST):
        try:
            found.append(os.read(descriptor, PACKET))
        except BlockingIOError:
            break
    return found


def _receiver(packet: bytes) -> int:
    """Return the node to which an IPv4 packet goes; -1 for another address."""
    destination = packet[16:20]
    return destination[3] - 1 if destination[:3] == bytes([10, 77, 0]) else -1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command in the first namespace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--delay", type=float, default=0.01, help="seconds in one direction")
    parser.add_argument("--jitter", type=float, default=0.0, help="maximum of a random delay, in seconds")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets")
    parser.add_argument("--bandwidth", type=float, help="bytes per second")
    parser.add_argument("--link", nargs=2, action="append", default=[], metavar=("FROM:TO", "JSON"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    link = LinkConfig(delay=given.delay, jitter=given.jitter, loss=given.loss, bandwidth=given.bandwidth)
    links = {
        (int(pair.split(":")[0]), int(pair.split(":")[1])): LinkConfig(**json.loads(own)) for pair, own in given.link
    }
    words = given.command[1:] if given.command[:1] == ["--"] else given.command
    under = {RUNS_UNDER: command().removesuffix(shlex.join(words)).strip()}
    relay = Relay(given.nodes, link, links)
    try:
        return subprocess.run([*inside(0), *words], env={**os.environ, **under}, check=False).returncode
    finally:
        relay.close()


if __name__ == "__main__":
    sys.exit(main())
