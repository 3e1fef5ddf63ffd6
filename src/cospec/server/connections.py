"""Connections with time limits, and a limit on the number of connections.

A connection *waits* for the client: for the head of a request, the rest of a body, the next request, or a client that
reads slowly. Each wait has a deadline, which single bytes do not move. At the connection limit the longest waiting
connection closes for a new connection. So clients that send nothing, or read nothing, cannot block others. If no
connection waits, the new connection closes at once.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Sized
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from cospec.server import errors
from cospec.server.settings import ServerSettings

ACCEPTS = 128  # connections that the loop accepts at once, before a check of the limit
RESERVED_FILES = 64 + ACCEPTS  # 64 for libraries, the engine's socket and its process
MIN_CONNECTIONS = 8
READ_BYTES = 16 * 2**10  # bytes per read: parsing a body of one-byte chunks takes long
MAX_HEAD_BYTES = 64 * 2**10  # of a request line with its headers, or of trailers; the parser has no limit of its own
MAX_PIPELINED = 16  # requests of a connection that wait for an answer before the server reads on
PROGRESS_BYTES = 64 * 2**10  # that a slow client has to read within the write timeout, also while a connection closes
QUIET_SECONDS = 60.0  # between two log lines about the same problem
LATE = "The request did not arrive in time; the connection closes."
INVALID = "The request is not valid HTTP/1.1; the connection closes."
TOO_LONG = f"The request line and headers have more than {MAX_HEAD_BYTES:,} bytes; the connection closes."
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
            ws="none",
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


class Awaited(Enum):
    """What the client has to send."""

    HEAD = auto()
    BODY = auto()


class PipelineFlow(FlowControl):
    """Reads no further requests of a connection while many wait for an answer.

    Args:
        pipeline: the requests that wait.
    """

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Read on where few requests wait. With none, a paused connection would not notice that the client left."""
        if len(self._pipeline) < MAX_PIPELINED:
            super().resume_reading()


class TimedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with deadlines for the client, and limits on heads, trailers and requests that wait."""

    def __init__(
        self,
        config: TimedConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config
        self._head_bytes = 0  # received of a head that is not complete
        self._in_body = False  # a head is complete, its body is not
        self._running: Any = None  # uvicorn's cycle of the request that is being answered; ``cycle`` is the newest one
        self._offered = False  # the request that is being parsed offers another protocol
        self._refusal: tuple[HTTPStatus, str] | None = None  # to be sent after the answers to earlier requests
        self._awaited: Awaited | None = None  # what the deadline belongs to
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes when the write deadline was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; close a waiting connection if necessary."""
        if len(self.connections) >= self._limits.max_connections and not self._make_room():
            self._limits.refused.warn(self._limits.max_connections)
            self.transport = transport
            transport.abort()
            return
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)
        self.flow = PipelineFlow(transport, self.pipeline)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection, and end its requests."""
        self._stop_writing()
        self._stop_waiting()
        self.pipeline.clear()
        self._disconnect(self._running)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received data, and set the deadline for the missing data."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, TOO_LONG)
        self._watch()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers of a chunked body are no headers: a proxy does not filter them."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless the request has to be read again without an offer."""
        if self.parser.should_upgrade():
            self._offered = True
            return
        super().on_headers_complete()
        self._head_bytes, self._in_body = 0, True
        self._stop_waiting()  # each body has its own deadline
        if not self.pipeline:  # otherwise uvicorn has queued the request
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body of a request."""
        if self._offered:
            return
        self._head_bytes, self._in_body = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Finish an answer; uvicorn's timer waits for the next request."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._running = None if self.transport.is_closing() else following
        if self.transport.is_closing():
            self._expect_reading()
        elif self._refusal is not None and self._running is None:
            self._close(*self._refusal)
        elif self._state() is Awaited.HEAD:
            self._stop_waiting()
            self._limits.waiting[self] = None
        else:
            self._watch()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a next request. Do not wait for a client that reads nothing."""
        super().timeout_keep_alive_handler()
        self._expect_reading()

    def pause_writing(self) -> None:
        """Start the write deadline: the client reads slower than the server writes."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Stop the write deadline: the client has read. A connection that closes waits until all is sent."""
        super().resume_writing()
        if self.transport.is_closing():
            return
        self._stop_writing()
        if self._deadline is None and self._state() is None:
            self._limits.waiting.pop(self, None)

    def _feed(self, data: bytes) -> None:
        """Parse. The parser drops the body of a request that offers another protocol, so the offer is taken out."""
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(HTTPStatus.BAD_REQUEST, INVALID)
                    return
                data = self._head_without_offer() + data[offer.args[0] :]
            except httptools.HttpParserError:
                self._refuse(HTTPStatus.BAD_REQUEST, INVALID)
                return
            else:
                return

    def _head_without_offer(self) -> bytes:
        """Return the head that was parsed without its line ``Upgrade``, for a new parser."""
        old, self._offered = self.parser, False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's parser
        first = b"%b %b HTTP/%b" % (old.get_method(), self.url, old.get_http_version().encode())
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([first, *lines, b"", b""])

    def _state(self) -> Awaited | None:
        """Return what the client has to send now; None while the server works, or closes the connection."""
        if self.transport.is_closing() or self.pipeline or self._refusal is not None:
            return None
        if self._in_body:
            return Awaited.BODY
        return Awaited.HEAD if self.cycle is None or self.cycle.response_complete else None

    def _watch(self) -> None:
        """Start the deadline of the data that the client has to send; stop the earlier deadline."""
        state = self._state()
        if state is self._awaited and self._deadline is not None:
            return
        self._stop_waiting()
        if state is Awaited.HEAD and self.timeout_keep_alive_task is None:
            self._await(state, self._limits.settings.header_timeout)
        elif state is Awaited.BODY:
            self._await(state, self._limits.settings.body_timeout)

    def _await(self, state: Awaited, seconds: float) -> None:
        self._awaited = state
        self._limits.waiting[self] = None
        self._deadline = self.loop.call_later(seconds, self._refuse, HTTPStatus.REQUEST_TIMEOUT, LATE)

    def _stop_waiting(self) -> None:
        if self._write_deadline is None:
            self._limits.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_writing(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _expect_reading(self) -> None:
        """Set the write deadline: by then the client has to have read ``PROGRESS_BYTES``, or all."""
        if self._write_deadline is None:
            self._limits.waiting[self] = None
            self._unsent = self.transport.get_write_buffer_size()
            self._write_deadline = self.loop.call_later(self._limits.settings.write_timeout, self._check_progress)

    def _check_progress(self) -> None:
        self._write_deadline = None
        if self._unsent - self.transport.get_write_buffer_size() >= PROGRESS_BYTES:
            self._expect_reading()
        else:
            self.transport.abort()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Close the connection of a client that broke a limit, after the answers to its earlier requests."""
        self._stop_waiting()
        if self._in_body and self.pipeline:
            self.pipeline.popleft()  # the request with the broken body, the newest one
        elif self._in_body and self._running is None:
            self._close(status, "")  # the request has its answer
            return
        elif self._in_body or self._running is None:
            self._close(status, message)
            return
        self._refusal = status, message

    def _close(self, status: HTTPStatus, message: str) -> None:
        """Send an error, if there is a message and no answer has begun, and close the connection."""
        if message and not (self._running is not None and self._running.response_started):
            body = msgspec.json.encode(errors.body(message, status))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self._disconnect(self._running)  # the application writes no second answer
        self.transport.close()
        self._expect_reading()

    def _disconnect(self, cycle: Any) -> None:
        """Tell the application of a request that the client is gone."""
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest; return False if none waits."""
        oldest = next(iter(self._limits.waiting), None)
        if oldest is None:
            return False
        oldest._stop_writing()
        oldest._stop_waiting()
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True
