"""Decides which calls may start, and when: the bounds of the queue and of bodies, the share and the rate of each key.

The decisions of ``Admission`` are pure: callers pass the time, and no call waits. A key's identity is its index among
the server's keys. Without keys all senders are key 0.
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

QUEUE_PER_SEQUENCE = 4  # outputs in the default queue per running sequence
SHARE_OF_SEVERAL = 0.5  # share of the queue for one of several keys
RETRY_SECONDS = 1  # seconds after which a client may retry a full queue
BODY_BYTES = 256 * 2**20  # of the bodies of all requests that are not answered


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds for all calls.

    Attributes:
        outputs: outputs that run or wait, over all keys.
        key_share: the share of ``outputs`` that one key may hold, 0 to 1.
        requests_per_minute: calls per minute of one key; None for any number.
        body_bytes: bytes of the bodies of all requests that are not answered; a key may hold its share.
    """

    outputs: int = 256
    key_share: float = 1.0
    requests_per_minute: int | None = None
    body_bytes: int = BODY_BYTES

    @classmethod
    def of(cls, settings: ServerSettings, max_num_seqs: int) -> AdmissionLimits:
        """Return the limits of a server whose engine runs ``max_num_seqs`` outputs together."""
        outputs = settings.max_concurrent_requests or max(QUEUE_PER_SEQUENCE * max_num_seqs, settings.max_outputs)
        share = settings.max_key_share or (SHARE_OF_SEVERAL if len(settings.api_key) > 1 else 1.0)
        # Each key has room for one body of the largest size.
        body_bytes = max(BODY_BYTES, math.ceil(settings.max_body_bytes / share))
        return cls(outputs, share, settings.requests_per_minute, body_bytes)

    @property
    def outputs_per_key(self) -> int:
        """Number of outputs that one key may hold; at least one."""
        return max(1, int(self.outputs * self.key_share))


class Admission:
    """Counts the outputs and the calls of each key; a token bucket bounds the rate of calls."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._held: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()
        self._buckets: dict[int, tuple[float, float]] = {}  # calls left, and the time of the count

    @property
    def held(self) -> int:
        """Number of outputs that run or wait."""
        return self._held.total()

    def arrive(self, key: int, now: float) -> None:
        """Count a call that begins at ``now`` (seconds of any clock), before its body is read.

        Raises:
            Overloaded: the queue is full, or the key's rate is too high. A refused call does not count.
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
            raise Overloaded(f"This key began {per_minute} requests within a minute, the limit of a key.", wait)
        self._buckets[key] = left - 1, now

    def take(self, key: int, outputs: int) -> None:
        """Reserve ``outputs`` places of the queue for a key.

        Raises:
            InvalidInput: the call is larger than the key's part of the queue.
            Overloaded: too few places are free now.
        """
        most = self._limits.outputs_per_key
        if outputs > most:
            raise InvalidInput("n", words(f"giving {outputs} outputs"), f"at most {most} for all prompts together")
        self._check_room(key, outputs)
        self._held[key] += outputs

    def take_bytes(self, key: int, size: int) -> None:
        """Reserve memory for ``size`` bytes of a body that a key sends.

        Raises:
            Overloaded: the bodies of all requests, or of this key, have too many bytes now.
        """
        most = self._limits.body_bytes
        if self._bytes.total() + size > most or self._bytes[key] + size > math.ceil(most * self._limits.key_share):
            raise Overloaded("The bodies of present requests fill their memory; try again later.", RETRY_SECONDS)
        self._bytes[key] += size

    def release(self, key: int, outputs: int, size: int = 0) -> None:
        """Free the places, and ``size`` bytes."""
        self._held[key] -= outputs
        self._bytes[key] -= size

    def _check_room(self, key: int, outputs: int) -> None:
        if self.held + outputs > self._limits.outputs:
            message = f"The queue holds {self.held} of {self._limits.outputs} outputs; try again later."
            raise Overloaded(message, RETRY_SECONDS)
        if self._held[key] + outputs > self._limits.outputs_per_key:
            message = f"This key holds {self._held[key]} of {self._limits.outputs_per_key} outputs; try again later."
            raise Overloaded(message, RETRY_SECONDS)


@dataclass(slots=True)
class Ticket:
    """What one call holds, and when the call began. Only ``take``, ``take_bytes`` and ``release`` change the fields."""

    admission: Admission
    key: int = 0
    outputs: int = field(default=0, init=False)
    size: int = field(default=0, init=False)
    began: float = field(default_factory=time.monotonic, init=False)

    def arrive(self) -> None:
        """See ``Admission.arrive``."""
        self.admission.arrive(self.key, time.monotonic())

    def take(self, outputs: int) -> None:
        """See ``Admission.take``."""
        self.admission.take(self.key, outputs)
        self.outputs += outputs

    def take_bytes(self, size: int) -> None:
        """See ``Admission.take_bytes``."""
        self.admission.take_bytes(self.key, size)
        self.size += size

    def release(self) -> None:
        """Free all places."""
        self.admission.release(self.key, self.outputs, self.size)
        self.outputs = self.size = 0


class Tickets:
    """ASGI middleware: each request gets a ticket, which ends with the answer's last byte or with the connection."""

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
    """Return the ticket of a request."""
    found: Ticket = http.state.ticket
    return found
