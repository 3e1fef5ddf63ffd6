"""Ray Serve's router for the replicas of a target: requests that share a prefix meet in one replica's cache."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cospec.cluster.prefix_index import PrefixIndex, rank

SLACK = 4  # requests by which the queue of a replica with the prefix may be longer


class PrefixRouter(RequestRouter):
    """Reads the digests of the prompt from the second argument of a call; calls without digests go by queue alone."""

    def initialize_state(self, **kwargs: int) -> None:
        """Called by Ray Serve with ``request_router_kwargs``: ``slack``."""
        self._slack = kwargs.get("slack", SLACK)
        self._index: PrefixIndex[ReplicaID] = PrefixIndex()
        self._running: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One rank per replica, so that Ray Serve tries the replicas one after the other."""
        candidates = random.sample(candidate_replicas, len(candidate_replicas))  # equal replicas share the work
        by_id = {each.replica_id: each for each in candidates}
        prompt = _digests(pending_request)
        matched = {each: self._index.matched(prompt, each) for each in by_id}
        return [[by_id[each]] for each in rank(matched, self._running, self._slack)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note the prefix and the place in the queue."""
        self._running[replica_id] += 1
        self._index.insert(_digests(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note the free place."""
        self._running[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the replicas that are gone."""
        super().update_replicas(replicas)
        present = [each.replica_id for each in replicas]
        self._index.keep(present)
        for gone in self._running.keys() - set(present):
            del self._running[gone]


def _digests(pending: PendingRequest | None) -> tuple[bytes, ...]:
    return pending.args[1] if pending is not None and len(pending.args) > 1 else ()
