"""The transport between API server and replicas: calls and streams of a Ray Serve handle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cospec.cluster.replicated_engine import ReplicaLost
from cospec.errors import EngineStopped
from cospec.runtime.messages import EngineInfo

METRICS_SECONDS = 3.0


class RayTransport:
    """Every call goes through the router of the handle; see ``prefix_router``."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streams: Any = handle.options(stream=True)

    async def info(self) -> EngineInfo:
        """Wait for the first replica."""
        found: EngineInfo = await self._handle.info.remote()
        return found

    async def generate(
        self, request: list[bytes], prefix: tuple[bytes, ...], age: float
    ) -> AsyncGenerator[list[bytes], None]:
        """The encoded items of one request. Closing the generator cancels the request.

        Raises:
            ReplicaLost: the replica died or is unreachable.
            EngineStopped: the call itself failed, and would fail elsewhere.
        """
        response = self._streams.generate.remote(request, prefix, age)
        try:
            async for item in response:
                yield item
        except RayTaskError as error:
            raise EngineStopped(f"A replica failed: {' '.join(str(error.cause).split())}.") from error
        except (RayError, RayServeException) as error:
            raise ReplicaLost(f"A replica is lost ({type(error).__name__}).") from error
        finally:
            with contextlib.suppress(RayError, RayServeException):
                response.cancel()

    async def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each replica that answers in time."""
        response = self._handle.broadcast("metrics")
        try:
            found = await response.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            return []
        return [each for each in found if isinstance(each, dict)]

    async def running(self) -> set[str]:
        """Names of the actors that run, of this and other deployments.

        Raises:
            RayError: Ray's head does not answer.
        """
        return {each["name"] for each in await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)}
