"""A replica of the target: an engine process and its client, inside an actor of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cospec.cluster.config import TargetOptions
from cospec.cluster.replica_reports import ReplicaReport
from cospec.cluster.stage_actor import ReplicaStages
from cospec.config import EngineConfig
from cospec.core.types import Request
from cospec.errors import EngineEnded, EngineStopped
from cospec.runtime.async_engine import AsyncEngineClient
from cospec.runtime.codec import Codec
from cospec.runtime.engine_client import RequestRefused
from cospec.runtime.engine_process_main import Build, build_engine
from cospec.runtime.engine_supervision import Supervision
from cospec.runtime.messages import EngineInfo, Events, Failed, ProtocolMessage, Rejected

HERE = TargetOptions()  # on any machine, without stages elsewhere
REPORT_PERIOD = 1.0  # seconds between two reports to the API server
REPORT_SECONDS = 3.0  # for one report; the API server may be away


class Unavailable(ProtocolMessage, frozen=True):
    """The engine of the replica restarts, drains or has ended. The engine has not seen the request."""

    message: str


StreamItem = Events | Rejected | Failed | Unavailable


@dataclass(frozen=True, slots=True)
class NodeBinding:
    """Where a replica waits for its drafter nodes.

    Attributes:
        keys: a folder of ``cospec node keys``; None: on the loopback interface.
    """

    keys: Path | None = None

    def free_address(self) -> str:
        """A free port of this machine, as a ZeroMQ address."""
        host = "127.0.0.1" if self.keys is None else ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((host, 0))
            return f"tcp://{host}:{listener.getsockname()[1]}"


class EngineReplica:
    """Runs one engine process. The methods are called by the API server through Ray Serve, never per step."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits constructors
        self,
        config: EngineConfig,
        supervision: Supervision,
        nodes: NodeBinding | None = None,
        target: TargetOptions = HERE,
        build: Build = build_engine,
    ) -> None:
        self._client = AsyncEngineClient(build, supervision)
        self._requests, self._items = Codec(Request), Codec(StreamItem)
        self._address, self._healthy = "", False
        self._api: Any = None  # a handle, from the first report on
        self._reporting: asyncio.Task[None] | None = None
        stages, placement = target.stages, target.placement
        if placement.tier_prices:
            price = placement.price(ray.get_runtime_context().get_node_labels(), config.cost_per_hour)
            config = config.model_copy(update={"cost_per_hour": price})
        self._stages = None if stages is None else ReplicaStages(stages.placement, config.pipeline_parallel_size)
        if self._stages is not None:
            config = await self._stages.engine_config(config)
        if nodes is not None:
            self._address = nodes.free_address()
            config = _bound(config, self._address, nodes.keys)
        await self._client.start(config, () if self._stages is None else self._stages.files)
        self._reporting = asyncio.create_task(self._report_often())

    async def check_health(self) -> None:
        """Raise when the engine process or a stage host has ended for good; Ray Serve then replaces the replica."""
        self._healthy = False
        self._client.check_ended()
        if self._stages is not None:
            await self._stages.check()
        self._healthy = True

    async def _report_often(self) -> None:
        """Report to the API server until the task is cancelled."""
        while True:
            await self._report()
            await asyncio.sleep(REPORT_PERIOD)

    async def _report(self, leaves: bool = False) -> None:
        """Send the API server the state of this replica; no report reaches an API server that is away."""
        status, hosts = self._client.status, 0 if self._stages is None else self._stages.restarts
        with contextlib.suppress(RayServeException, RayError, RuntimeError, TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                if self._api is None:
                    app = serve.get_replica_context().app_name
                    self._api = await asyncio.to_thread(serve.get_app_handle, app)
                name = str(ray.get_runtime_context().get_actor_name())
                await self._api.note_replica.remote(ReplicaReport(name, status.up, status.restarts, hosts, leaves))

    async def drafter_address(self) -> tuple[int, str]:
        """The rank of this replica, and the address that its drafter nodes connect to."""
        return serve.get_replica_context().rank.rank, self._address

    async def info(self) -> EngineInfo:
        """The facts that the engine sent when the engine was ready."""
        return self._client.info

    async def metrics(self) -> dict[str, Any] | None:
        """``EngineMetrics`` as a dictionary; None while the engine does not answer."""
        try:
            return await self._client.metrics()
        except EngineStopped:
            return None

    async def generate(
        self, request: list[bytes], digests: tuple[bytes, ...], age: float
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the events of a request, encoded. A cancelled call aborts the request in the engine.

        A stream that ends before the last event asks the caller to go on elsewhere.

        Args:
            request: the encoded ``Request``.
            digests: read by the router.
            age: seconds since the request arrived; clocks of two machines have nothing in common.
        """
        found = replace(self._requests.decode(request), arrival=time.monotonic() - age)
        try:
            self._client.check()
        except EngineStopped as error:
            yield self._encode(Unavailable(str(error)))
            return
        try:
            async with contextlib.aclosing(self._client.submit([found])) as events:
                async for event in events:
                    yield self._encode(Events((event,)))
        except RequestRefused as error:
            yield self._encode(Rejected(found.id, str(error), error.field))
        except EngineEnded:
            return
        except EngineStopped as error:
            yield self._encode(Failed(str(error)))

    def _encode(self, item: StreamItem) -> list[bytes]:
        return [bytes(part) for part in self._items.encode(item)]

    async def __del__(self) -> None:
        # Ray Serve awaits this coroutine before the actor ends.
        if self._reporting is not None:
            self._reporting.cancel()
        ends = [self._client.close()]
        if self._healthy:  # else Ray Serve gave the replica up
            ends.insert(0, self._report(leaves=True))
        await asyncio.gather(*ends)  # at once: Ray kills a replica after its time of grace
        if self._stages is not None:
            await self._stages.close()


def _bound(config: EngineConfig, address: str, keys: Path | None) -> EngineConfig:
    """The configuration of an engine that waits for drafter nodes at ``address``."""
    if config.speculative_config is None:
        return config
    nodes = {**config.speculative_config.drafter_nodes, "bind": address, "keys": None if keys is None else str(keys)}
    speculative = config.speculative_config.model_copy(update={"drafter_nodes": nodes})
    return config.model_copy(update={"speculative_config": speculative})
