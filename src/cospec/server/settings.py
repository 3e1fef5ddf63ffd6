"""The operator's settings of the server: address, keys, and bounds of every request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cospec.plugin_options import Options
from cospec.runtime.engine_process_main import LOG_LEVEL
from cospec.runtime.engine_supervision import MAX_RESTARTS, TIMEOUT
from cospec.sampling_params import MAX_LOGPROBS


def _several(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else (given,) if isinstance(given, str) else given


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_several)]


class ServerSettings(Options):
    """Options of the server; times are in seconds.

    Attributes:
        host: the address on which the server listens.
        port: 0 takes a free port and prints the port.
        api_key: the valid keys; empty for open access. Without ``api_key`` the variable ``COSPEC_API_KEY`` is the key.
        api_key_file: a file with more keys, one per line.
        allowed_hosts: allowed values of the header ``Host``, ``*.`` for subdomains; empty for any.
        allowed_origins: allowed CORS origins, ``*`` for any; empty for none.
        max_body_bytes: bytes of one request.
        max_prompts: prompts per call.
        max_outputs: prompts times ``n`` per call.
        max_stop_sequences: stop strings per request.
        max_logprobs: alternatives per token.
        max_priority: requests may set a priority from minus to plus this number.
        max_concurrent_requests: outputs that run or wait; more get 429. None is 4 times ``max_num_seqs``, at least
            ``max_outputs``.
        max_key_share: share of these outputs for one key; None is 1 with one key, else 0.5.
        requests_per_minute: calls per minute of one key; without keys, of all clients together. None for any number.
        request_timeout: the longest time from the start of a call to the end of its answer; then 504 or an error event.
        max_connections: open connections; at the limit the longest waiting connection closes.
        header_timeout: for the head of a request, from its first byte or the start of the connection.
        body_timeout: for the body of a request.
        keep_alive_timeout: for the next request of a connection.
        write_timeout: for a client to read the data that fills its connection, or 64 KiB of it.
        strict: refuse unknown keys of a request instead of naming the keys in a header.
        drain_timeout: for running requests after SIGTERM; a second signal aborts the requests.
        engine_timeout: time without progress after which ``/health`` reports a frozen engine.
        max_engine_restarts: consecutive restarts before the server ends; 0 ends the server with the engine.
        log_level: of the web server. With ``debug`` or ``trace`` the engine also logs why a request takes the Python
            path.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: Texts = ()
    api_key_file: Path | None = Field(default=None, strict=False)
    allowed_hosts: Texts = ()
    allowed_origins: Texts = ()
    max_body_bytes: int = Field(default=2 * 2**20, ge=1)
    max_prompts: int = Field(default=128, ge=1)
    max_outputs: int = Field(default=128, ge=1)
    max_stop_sequences: int = Field(default=16, ge=0)
    max_logprobs: int = Field(default=MAX_LOGPROBS, ge=0, le=MAX_LOGPROBS)
    max_priority: int = Field(default=0, ge=0, le=2**31)
    max_concurrent_requests: int | None = Field(default=None, ge=1)
    max_key_share: float | None = Field(default=None, gt=0, le=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    request_timeout: float = Field(default=600.0, gt=0)
    max_connections: int = Field(default=1024, ge=1)
    header_timeout: float = Field(default=10.0, gt=0)
    body_timeout: float = Field(default=60.0, gt=0)
    keep_alive_timeout: int = Field(default=5, ge=1)
    write_timeout: float = Field(default=60.0, gt=0)
    strict: bool = False
    drain_timeout: float = Field(default=30.0, ge=0)
    engine_timeout: float = Field(default=TIMEOUT, ge=2, le=86400)
    max_engine_restarts: int = Field(default=MAX_RESTARTS, ge=0)
    log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "warning"

    @property
    def engine_log_level(self) -> str:
        """The log level of the engine process."""
        return "DEBUG" if self.log_level in ("debug", "trace") else LOG_LEVEL
