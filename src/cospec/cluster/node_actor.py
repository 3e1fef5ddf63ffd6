"""Drafter nodes as actors: Ray places and restarts the node, the node itself talks to its verifier over ZeroMQ.

A node serves one replica of the target. Ray hands out the addresses; steps do not pass through Ray. A node whose
thread ended, or whose replica is gone, fails its health check, and Ray Serve starts the node again, with back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cospec.cluster.config import DrafterOptions
from cospec.cluster.nodes.worker import DrafterNode, NodeOptions
from cospec.config import EngineConfig
from cospec.errors import DrafterLost

LOOK_SECONDS = 1.0  # between two looks at the addresses of the replicas
STOP_SECONDS = 5.0

log = logging.getLogger(__name__)


class NodeActor:
    """One drafter node.

    Args:
        config: of the target's engine; the node reads the target's tokenizer and no weights.
        keys: the folder of ``cospec node keys``; None within one machine.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits constructors
        self, config: EngineConfig, drafter: DrafterOptions, keys: Path | None, target: DeploymentHandle[Any]
    ) -> None:
        from cospec.assembly.node_drafters import build_offers  # heavy imports, only for an actor that loads models

        self._target = target
        context = serve.get_replica_context()
        name = f"{drafter.name}-{context.replica_id.unique_id}"
        offers = await asyncio.to_thread(build_offers, config, [{"name": drafter.name, **drafter.drafter}])
        while not (addresses := await self._addresses()):
            await asyncio.sleep(LOOK_SECONDS)
        self._address = addresses[context.rank.rank % len(addresses)]
        self._node = DrafterNode(NodeOptions(self._address, name, keys, drafter.cost_per_hour), offers)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._orphan = False
        self._watch = asyncio.create_task(self._look())

    async def check_health(self) -> None:
        """Raise when the node has ended, or its replica is gone."""
        if not self._thread.is_alive():
            raise DrafterLost("The thread of the drafter node has ended.")
        if self._orphan:
            raise DrafterLost(f"The replica at {self._address} is gone.")

    def _serve(self) -> None:
        try:
            self._node.serve()
        except Exception:
            log.exception("the drafter node has failed")
        finally:
            self._node.close()

    async def _look(self) -> None:
        """Notice when the replica of this node is replaced."""
        while not self._orphan:
            await asyncio.sleep(LOOK_SECONDS)
            addresses = await self._addresses()
            self._orphan = bool(addresses) and self._address not in addresses

    async def _addresses(self) -> list[str]:
        """Addresses of all replicas that answer."""
        try:
            response = self._target.broadcast("drafter_address")
            found = await response.results_async(timeout_s=LOOK_SECONDS * 5, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            return []
        return sorted(each for each in found if isinstance(each, str))

    async def __del__(self) -> None:
        # Ray Serve awaits this coroutine before the actor ends.
        with contextlib.suppress(AttributeError):  # the constructor failed
            self._watch.cancel()
            self._node.stop()
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
