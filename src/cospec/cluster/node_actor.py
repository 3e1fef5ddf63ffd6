"""Drafter nodes as actors: Ray places and restarts the node, the node itself talks to its verifier over ZeroMQ.

A node serves one replica of the target. Ray hands out the addresses; steps do not pass through Ray. When replicas
start or end, nodes move, so that all replicas have equally many nodes. A node that failed fails its health check, and
Ray Serve starts the node again, with back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingContext
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cospec.cluster.config import DrafterOptions
from cospec.config import EngineConfig
from cospec.errors import DrafterLost

if TYPE_CHECKING:
    from cospec.cluster.nodes.worker import DrafterNode

LOOK_SECONDS = 1.0  # between two looks at the addresses of the replicas
STOP_SECONDS = 5.0
BUSY = "busy"  # the metric by which the number of nodes is chosen

log = logging.getLogger(__name__)


class NodePolicy:
    """Chooses the number of drafter nodes of one kind by their work; Ray Serve applies bounds and delays.

    Args:
        busy: see ``NodeCount``.
    """

    def __init__(self, busy: float) -> None:
        self._busy = busy

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of nodes that would work for this share of their time, and no state."""
        shares = (context.aggregated_metrics or {}).get(BUSY, {})
        if not shares:  # no node has reported yet
            return context.target_num_replicas, {}
        return max(1, math.ceil(sum(shares.values()) / self._busy)), {}


class NodeActor:
    """One drafter node.

    Args:
        config: of the target's engine; the node reads the target's tokenizer and no weights.
        keys: the folder of ``cospec node keys``; None within one machine.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits constructors
        self, config: EngineConfig, drafter: DrafterOptions, keys: Path | None, target: DeploymentHandle[Any]
    ) -> None:
        # Imports of torch, which the processes that only deploy this class do not need.
        from cospec.assembly.drafters_of_node import build_offers
        from cospec.cluster.nodes.worker import NodeOptions

        self._target = target
        context = serve.get_replica_context()
        name = f"{drafter.name}-{context.replica_id.unique_id}"
        labels = ray.get_runtime_context().get_node_labels()
        price = drafter.placement.price(labels, drafter.cost_per_hour)
        self._options = NodeOptions("", name, keys, price, link=drafter.link)
        self._offers = await asyncio.to_thread(build_offers, config, [{"name": drafter.name, **drafter.drafter}])
        while not (address := await self._choose()):
            await asyncio.sleep(LOOK_SECONDS)
        self._failed = False
        self._ended, self._reported = 0.0, (time.monotonic(), 0.0)
        self._join(address)
        self._watch = asyncio.create_task(self._look())

    async def check_health(self) -> None:
        """Raise when the node has failed."""
        if self._failed or self._watch.done():
            raise DrafterLost("The drafter node has failed.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the share of the time since the last call in which the node worked; Ray Serve calls this."""
        (before, worked), now = self._reported, (time.monotonic(), self._ended + self._node.busy)
        self._reported = now
        return {BUSY: (now[1] - worked) / max(now[0] - before, 1e-3)}

    def _join(self, address: str) -> None:
        """Draft for the replica at ``address``, in a thread."""
        from cospec.cluster.nodes.worker import DrafterNode

        self._address = address
        self._node = DrafterNode(replace(self._options, address=address), self._offers)
        self._thread = threading.Thread(target=self._serve, args=[self._node], daemon=True)
        self._thread.start()

    def _serve(self, node: DrafterNode) -> None:
        try:
            with contextlib.closing(node):
                node.serve()
        except Exception:
            log.exception("the drafter node has failed")
            self._failed = True

    async def _look(self) -> None:
        """Move when two looks in a row choose another replica."""
        before = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            chosen = await self._choose()
            if chosen == before and chosen not in ("", self._address):
                log.info("the drafter node moves from %s to %s", self._address, chosen)
                self._node.stop()
                await asyncio.to_thread(self._thread.join)
                self._ended += self._node.busy
                self._join(chosen)
            before = chosen

    async def _choose(self) -> str:
        """The address of this node's replica; empty while no replica answers."""
        addresses = await self._addresses()
        return addresses[serve.get_replica_context().rank.rank % len(addresses)] if addresses else ""

    async def _addresses(self) -> list[str]:
        """Addresses of all replicas that answer, by rank: a replica that starts follows those that run."""
        try:
            response = self._target.broadcast("drafter_address")
            found = await response.results_async(timeout_s=LOOK_SECONDS * 5, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            return []
        return [address for _, address in sorted(each for each in found if isinstance(each, tuple))]

    async def __del__(self) -> None:
        # Ray Serve awaits this coroutine before the actor ends.
        with contextlib.suppress(AttributeError):  # the constructor failed
            self._watch.cancel()
            self._node.stop()
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
