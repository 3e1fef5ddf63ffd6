"""Who may start a call, and when: the bound of the queue, the share of each key, the rate of each key.

The decisions of ``Admission`` are pure: callers give the time, and nothing waits. A key is known by its position among
the server's keys; without keys all senders are key 0.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from cospec.errors import InvalidInput, words
from cospec.server.errors import Overloaded
from cospec.server.settings import ServerSettings

QUEUE_PER_SEQUENCE = 4  # outputs in the default queue for each sequence that runs at once
SHARE_OF_SEVERAL = 0.5  # of the queue that one of several keys may hold
RETRY_SECONDS = 1  # until a full queue is worth another try


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds that hold for all calls.

    Attributes:
        outputs: that run or wait at once, for all keys together.
        key_share: the part of ``outputs`` that one key may hold.
        requests_per_minute: calls that one key may begin; None for any number.
    """

    outputs: int = 256
    key_share: float = 1.0
    requests_per_minute: int | None = None

    @classmethod
    def of(cls, settings: ServerSettings, max_num_seqs: int) -> AdmissionLimits:
        """The limits of a server whose engine runs ``max_num_seqs`` outputs at once."""
        outputs = settings.max_concurrent_requests or max(QUEUE_PER_SEQUENCE * max_num_seqs, settings.max_outputs)
        share = settings.max_key_share or (SHARE_OF_SEVERAL if len(settings.api_key) > 1 else 1.0)
        return cls(outputs, share, settings.requests_per_minute)

    @property
    def outputs_per_key(self) -> int:
        """Outputs that one key may hold; at least one."""
        return max(1, int(self.outputs * self.key_share))


class Admission:
    """Counts the outputs of each key and the calls that each key began (a token bucket)."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._held: Counter[int] = Counter()
        self._buckets: dict[int, tuple[float, float]] = {}  # calls left, and when they were counted

    @property
    def held(self) -> int:
        """Outputs that run or wait."""
        return self._held.total()

    def arrive(self, key: int, now: float) -> None:
        """Count a call that begins at ``now`` (seconds of any clock), before its body is read.

        Raises:
            Overloaded: the queue is full, or the key began too many calls; a refused call does not count.
        """
        self._check_room(key, 1)
        per_minute = self._limits.requests_per_minute
        if per_minute is None:
            return
        left, before = self._buckets.get(key, (float(per_minute), now))
        left = min(float(per_minute), left + (now - before) * per_minute / 60)
        if left < 1:
            self._buckets[key] = left, now
            wait = math.ceil((1 - left) * 60 / per_minute)
            raise Overloaded(f"This key began {per_minute} requests within a minute, as many as allowed.", wait)
        self._buckets[key] = left - 1, now

    def take(self, key: int, outputs: int) -> None:
        """Give ``outputs`` places of the queue to a key.

        Raises:
            InvalidInput: the call is larger than the queue can ever be for the key.
            Overloaded: the places are not free now.
        """
        most = self._limits.outputs_per_key
        if outputs > most:
            raise InvalidInput("n", words(f"giving {outputs} outputs"), f"at most {most} for all prompts together")
        self._check_room(key, outputs)
        self._held[key] += outputs

    def release(self, key: int, outputs: int) -> None:
        """Take the places back."""
        self._held[key] -= outputs

    def _check_room(self, key: int, outputs: int) -> None:
        if self.held + outputs > self._limits.outputs:
            message = f"The queue holds {self.held} of {self._limits.outputs} outputs; try again later."
            raise Overloaded(message, RETRY_SECONDS)
        if self._held[key] + outputs > self._limits.outputs_per_key:
            message = f"This key holds {self._held[key]} of {self._limits.outputs_per_key} outputs; try again later."
            raise Overloaded(message, RETRY_SECONDS)


@dataclass(slots=True)
class Ticket:
    """The places of one call. Written by ``take`` and ``release`` alone."""

    admission: Admission
    key: int = 0
    outputs: int = field(default=0, init=False)

    def arrive(self) -> None:
        """See ``Admission.arrive``."""
        self.admission.arrive(self.key, time.monotonic())

    def take(self, outputs: int) -> None:
        """See ``Admission.take``."""
        self.admission.take(self.key, outputs)
        self.outputs += outputs

    def release(self) -> None:
        """Give all places back."""
        self.admission.release(self.key, self.outputs)
        self.outputs = 0


class Tickets:
    """ASGI middleware: each request gets a ticket, which ends with the last byte of the answer or the connection."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        ticket = state["ticket"] = Ticket(self._admission, state.get("key", 0))
        try:
            await self._app(scope, receive, send)
        finally:
            ticket.release()


def ticket(http: HttpRequest) -> Ticket:
    """The ticket of a request."""
    found: Ticket = http.state.ticket
    return found
