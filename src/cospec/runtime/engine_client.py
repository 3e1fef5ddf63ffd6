"""What the server needs of an engine: an engine process of this machine, or the replicas of a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cospec.core.types import Event, Request
from cospec.errors import CospecError
from cospec.runtime.messages import EngineInfo


class RequestRefused(CospecError):
    """The engine does not take a request; the sentence is the engine's, ``field`` is what it is about."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the server knows of the engine without an answer of the engine.

    Attributes:
        up: whether the process serves and makes progress; of replicas, whether one does.
        restarts: processes that were started after the first one, or after the first ones of the replicas.
        replayed: outputs that a new process went on with.
        live: outputs that have not finished.
        head_restarts: how often ``cospec cluster up`` started Ray's head again; 0 without Ray, as the counts below.
        replicas_lost: replicas that ended while Ray Serve needed them.
        stage_host_restarts: how often replicas started lost stage hosts again.
    """

    up: bool
    restarts: int
    replayed: int
    live: int
    head_restarts: int = 0
    replicas_lost: int = 0
    stage_host_restarts: int = 0


class EngineClient(Protocol):
    """An engine, seen from an asyncio program. Errors are ``CospecError``."""

    @property
    def info(self) -> EngineInfo:
        """The facts that the engine sent when the engine was ready."""
        ...

    @property
    def status(self) -> EngineStatus:
        """Counts of the client itself."""
        ...

    def check_alive(self) -> None:
        """Raise ``EngineStopped`` when the engine has ended, restarts, or makes no progress."""
        ...

    def check(self) -> None:
        """Raise ``EngineStopped`` when new requests are not taken, with the reason."""
        ...

    def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
        """The events of ``requests``, interleaved, until each has finished. Ending the iteration aborts the rest."""
        ...

    def abort(self, ids: Iterable[str]) -> None:
        """Drop requests: their streams end with finish reason ``abort``. Unknown and finished ids are ignored."""
        ...

    async def metrics(self) -> dict[str, Any]:
        """The engine's counters and gauges, ``EngineMetrics`` as a dictionary."""
        ...
