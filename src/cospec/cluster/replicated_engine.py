"""The replicas of a cluster as one engine: streams of requests, and their replay when a replica is lost.

A request runs on one replica. When the replica is lost, the request goes on elsewhere after its delivered tokens, see
``runtime.request_replay``. A replica whose engine restarts takes no request; the request waits and asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from cospec.cluster.prefix_index import digests
from cospec.cluster.replica import StreamItem, Unavailable
from cospec.cluster.replica_reports import ReplicaReports
from cospec.core.types import Event, Request
from cospec.errors import CospecError, EngineStopped
from cospec.metrics.engine_counters import merge
from cospec.runtime.codec import Codec
from cospec.runtime.engine_client import EngineStatus, RequestRefused
from cospec.runtime.messages import EngineInfo, Events, Failed, Rejected
from cospec.runtime.request_replay import LiveRequest, next_event

MAX_LOST_REPLICAS = 8  # the loss that ends a request; the replica judges requests that end its engine process
FIRST_DELAY, MAX_DELAY = 0.1, 2.0  # seconds before a request asks a replica again
MAX_DOUBLINGS = 5  # of the delay

log = logging.getLogger(__name__)


class ReplicaLost(CospecError):
    """A replica died, or cannot be reached; the rest of its streams will not arrive."""


class ReplicaUnavailable(CospecError):
    """A replica has not taken a request, because its engine restarts, drains or has ended."""


class Replicas(Protocol):
    """Transport to the replicas. ``ray_transport.RayTransport`` is the implementation over Ray Serve."""

    def generate(
        self, request: list[bytes], prefix: tuple[bytes, ...], age: float
    ) -> AsyncGenerator[list[bytes], None]:
        """The encoded items of one request, from one replica. Raises ``ReplicaLost``."""
        ...

    async def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each replica that answers."""
        ...


class ReplicatedEngine:
    """One engine, seen from an asyncio program; an ``EngineClient``.

    Args:
        reports: what the replicas report.

    Attributes:
        head_restarts: restarts of Ray's head, see ``EngineStatus``.
    """

    def __init__(self, replicas: Replicas, info: EngineInfo, reports: ReplicaReports) -> None:
        self._replicas, self._info, self._reports = replicas, info, reports
        self._live: dict[str, LiveRequest] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._requests, self._items = Codec(Request), Codec(StreamItem)
        self._replayed = self.head_restarts = 0

    @property
    def info(self) -> EngineInfo:
        """The facts that the first replica sent."""
        return self._info

    @property
    def status(self) -> EngineStatus:
        """Counts of the client itself, and of the replicas' reports."""
        return EngineStatus(
            up=self._reports.serves,
            restarts=self._reports.engine_restarts,
            replayed=self._replayed,
            live=len(self._live),
            head_restarts=self.head_restarts,
            replicas_lost=self._reports.lost,
            stage_host_restarts=self._reports.stage_host_restarts,
        )

    def check_alive(self) -> None:
        """Raise nothing: requests wait while Ray Serve replaces a replica."""

    def check(self) -> None:
        """Raise nothing: the cluster takes requests until the API server ends."""

    async def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
        """The events of ``requests``, interleaved, until each has finished. Ending the iteration aborts the rest.

        Raises:
            RequestRefused: the engine does not take one of them; the others are aborted.
            EngineStopped: too many replicas were lost with a request.
        """
        queue: asyncio.Queue[Event | CospecError] = asyncio.Queue()
        for request in requests:
            live = self._live[request.id] = LiveRequest(request, queue)
            self._streams[request.id] = asyncio.create_task(self._follow(live))
        open_ids = {request.id for request in requests}
        try:
            while open_ids:
                yield await next_event(queue, open_ids)
        finally:
            self.abort(open_ids)

    def abort(self, ids: Iterable[str]) -> None:
        """Drop requests: their streams end with finish reason ``abort``. Unknown and finished ids are ignored."""
        for id in list(ids):
            live = self._live.pop(id, None)
            if live is not None:
                self._streams.pop(id).cancel()
                live.abort()

    async def metrics(self) -> dict[str, Any]:
        """Sums and means over the replicas.

        Raises:
            EngineStopped: no replica answers.
        """
        found = await self._replicas.metrics()
        if not found:
            raise EngineStopped("No replica answers.")
        return merge(found)

    async def _follow(self, live: LiveRequest) -> None:
        """Deliver the events of a request, from one replica after another."""
        try:
            for attempt in itertools.count():
                try:
                    await self._attempt(live, attempt)
                    break
                except ReplicaUnavailable as error:
                    log.info("A replica has not taken request %s: %s", live.request.id, error)
                except ReplicaLost as error:
                    if not live.survives(MAX_LOST_REPLICAS):
                        raise EngineStopped(str(error)) from error
                    self._replayed += 1
                    log.warning("%s Request %s goes on after %d tokens.", error, live.request.id, len(live.tokens))
                await asyncio.sleep(min(FIRST_DELAY * 2 ** min(attempt, MAX_DOUBLINGS), MAX_DELAY))
        except CospecError as error:
            live.fail(error)
        except Exception as error:
            log.exception("the stream of request %s failed", live.request.id)
            live.fail(EngineStopped(f"The stream of the request failed: {type(error).__name__}: {error}."))
        self._live.pop(live.request.id, None)
        self._streams.pop(live.request.id, None)

    async def _attempt(self, live: LiveRequest, attempt: int) -> None:
        """Follow one replica up to the last event of a request.

        Raises:
            ReplicaLost: the replica has broken the stream.
            ReplicaUnavailable: the replica has not taken the request.
        """
        request = live.resumed()
        # A replica that is only slow may still know the request from an earlier attempt.
        sent = replace(request, id=f"{request.id}+{attempt}") if attempt else request
        encoded = [bytes(part) for part in self._requests.encode(sent)]
        # A second attempt goes to the replica with the shortest queue: the replica of the prefix may restart.
        prefix = () if attempt else digests(request.prompt)
        stream = self._replicas.generate(encoded, prefix, time.monotonic() - request.arrival)
        async with contextlib.aclosing(stream):
            async for parts in stream:
                if self._deliver(live, self._items.decode(parts)):
                    return
        raise ReplicaLost("A replica has ended a stream early.")

    def _deliver(self, live: LiveRequest, item: StreamItem) -> bool:
        """Pass an item on; returns whether the item was the last.

        Raises:
            ReplicaUnavailable: the replica has not taken the request.
            CospecError: the engine refuses or drops the request.
        """
        match item:
            case Rejected(_, message, field):
                raise RequestRefused(message, field)
            case Failed(message):
                raise EngineStopped(message)
            case Unavailable(message):
                raise ReplicaUnavailable(message)
            case Events(events):
                now = time.monotonic()
                for event in events:
                    live.deliver(replace(event, id=live.request.id), now)
                return any(event.finish is not None for event in events)
