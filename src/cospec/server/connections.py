"""Connections with time limits, and a limit on the number of connections.

A connection *waits* for the client: for the head of a request, the rest of a body, or the next request. Each
wait has a deadline, which single bytes do not move. At the connection limit the longest waiting connection closes for a
new connection. So clients that send nothing cannot block others. If no connection waits, the new connection closes at
once.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from http import HTTPStatus
from typing import Any

import h11
import msgspec
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from cospec.server import errors
from cospec.server.settings import ServerSettings

ACCEPTS = 128  # connections that the loop accepts at once, before a check of the limit
RESERVED_FILES = 64 + ACCEPTS  # 64 for libraries, the engine's socket and its process
MIN_CONNECTIONS = 8
READ_BYTES = 16 * 2**10  # bytes per read: parsing a body of one-byte chunks takes long
QUIET_SECONDS = 60.0  # between two log lines about the same problem
LATE = "The request did not arrive in time; the connection closes."
logger = logging.getLogger(__name__)


class TimedConfig(uvicorn.Config):
    """Uvicorn's configuration with the limits of ``TimedProtocol``.

    Args:
        flush: seconds to send pending answers at the end.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings, flush: int) -> None:
        super().__init__(
            app,
            http=TimedProtocol,
            log_level=settings.log_level,
            timeout_keep_alive=settings.keep_alive_timeout,
            timeout_graceful_shutdown=flush,
            backlog=ACCEPTS,
            lifespan="off",
        )
        self.settings = settings
        self.max_connections = connection_limit(settings.max_connections)
        self.waiting: dict[TimedProtocol, None] = {}  # oldest first
        self.refused = RateLimitedWarning("The server has reached its %d connections and refuses new ones.")


class RateLimitedWarning:
    """A warning that is logged at most once in ``QUIET_SECONDS``."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._next = 0.0

    def warn(self, *arguments: object) -> None:
        """Log the warning unless a recent log line exists."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + QUIET_SECONDS
            logger.warning(self._message, *arguments)


def connection_limit(wanted: int) -> int:
    """Return the number of possible connections, up to ``wanted``, after raising the soft limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(min(wanted, soft - RESERVED_FILES), MIN_CONNECTIONS)
    return wanted


def limit_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log occasionally that no connection can be accepted.

    Without a free file descriptor asyncio retries ``ACCEPTS`` times a second, and reports each time.
    """
    quiet = RateLimitedWarning("No connection can be accepted: %s.")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if str(context["message"]).startswith("socket.accept()"):
            quiet.warn(context.get("exception"))
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with deadlines for the client."""

    def __init__(
        self,
        config: TimedConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config
        self._awaited: object = None  # the client's state that the deadline belongs to
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; close a waiting connection if necessary."""
        if len(self.connections) >= self._limits.max_connections and not self._make_room():
            self._limits.refused.warn(self._limits.max_connections)
            self.transport = transport
            transport.abort()
            return
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._stop_waiting()
        self._stop_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received data, and set the deadline for the missing data."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Finish an answer; uvicorn's timer waits for the next request."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        elif self.conn.their_state is h11.IDLE:
            self._stop_waiting()
            self._limits.waiting[self] = None
        else:
            self._watch()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a next request. Do not wait for a client that reads nothing."""
        super().timeout_keep_alive_handler()
        self._abort_later()

    def pause_writing(self) -> None:
        """Start the write deadline: the client reads slower than the server writes."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._limits.settings.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the write deadline: the client has read."""
        super().resume_writing()
        self._stop_writing()

    def _watch(self) -> None:
        """Start the deadline of the data that the client has to send; stop the earlier deadline."""
        state = None if self.transport.is_closing() else self.conn.their_state
        if state is self._awaited and self._deadline is not None:
            return
        self._stop_waiting()
        if state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._await(state, self._limits.settings.header_timeout)
        elif state is h11.SEND_BODY:
            self._await(state, self._limits.settings.body_timeout)

    def _await(self, state: object, seconds: float) -> None:
        self._awaited = state
        self._limits.waiting[self] = None
        self._deadline = self.loop.call_later(seconds, self._give_up)

    def _stop_waiting(self) -> None:
        self._limits.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_writing(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _give_up(self) -> None:
        """Close a connection whose client did not send in time; answer with an error if possible."""
        self._stop_waiting()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(errors.body(LATE, HTTPStatus.REQUEST_TIMEOUT))
            length = str(len(body))
            headers = [("content-type", "application/json"), ("content-length", length), ("connection", "close")]
            response = h11.Response(status_code=HTTPStatus.REQUEST_TIMEOUT, headers=headers, reason=b"Request Timeout")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        self.loop.call_later(self._limits.settings.write_timeout, self.transport.abort)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest; return False if none waits."""
        oldest = next(iter(self._limits.waiting), None)
        if oldest is None:
            return False
        oldest._stop_waiting()
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True
