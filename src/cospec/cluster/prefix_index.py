"""Which replica has seen which prompt prefix. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np

BLOCK = 16  # tokens of one digest
MAX_BLOCKS = 128  # digests of one prompt; longer prompts are compared by their beginning
CAPACITY = 65_536  # digests kept for one replica
DIGEST_BYTES = 8
ReplicaT = TypeVar("ReplicaT", bound=Hashable)


def digests(tokens: Sequence[int]) -> tuple[bytes, ...]:
    """One digest per full block; a digest stands for its block and all blocks before."""
    found: list[bytes] = []
    previous = b""
    for start in range(0, min(len(tokens) // BLOCK, MAX_BLOCKS) * BLOCK, BLOCK):
        block = np.asarray(tokens[start : start + BLOCK], "<i8").tobytes()
        previous = blake2b(previous + block, digest_size=DIGEST_BYTES).digest()
        found.append(previous)
    return tuple(found)


class PrefixIndex(Generic[ReplicaT]):
    """The digests that were sent to each replica; the longest unused digests are dropped first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._seen: dict[ReplicaT, OrderedDict[bytes, None]] = {}

    def matched(self, prompt: Sequence[bytes], replica: ReplicaT) -> int:
        """Blocks of ``prompt`` from the beginning that ``replica`` has seen."""
        seen: Container[bytes] = self._seen.get(replica, ())
        return next((number for number, digest in enumerate(prompt) if digest not in seen), len(prompt))

    def insert(self, prompt: Sequence[bytes], replica: ReplicaT) -> None:
        """Note that ``prompt`` was sent to ``replica``."""
        seen = self._seen.setdefault(replica, OrderedDict())
        for digest in reversed(prompt):  # the beginning is the newest: prompts share beginnings
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > self._capacity:
            seen.popitem(last=False)

    def keep(self, replicas: Sequence[ReplicaT]) -> None:
        """Forget all replicas except these."""
        for gone in self._seen.keys() - set(replicas):
            del self._seen[gone]


def rank(matched: Mapping[ReplicaT, int], running: Mapping[ReplicaT, int], slack: int) -> list[ReplicaT]:
    """Replicas from the best to the worst.

    A replica with the prefix is worth a queue that is up to ``slack`` requests longer than the shortest queue. Among
    such replicas the longest prefix wins, then the shortest queue. The other replicas follow by their queues.
    """
    shortest = min((running[each] for each in matched), default=0)

    def order(replica: ReplicaT) -> tuple[bool, int, int]:
        busy = running[replica] > shortest + slack
        return busy, 0 if busy else -matched[replica], running[replica]

    return sorted(matched, key=order)
