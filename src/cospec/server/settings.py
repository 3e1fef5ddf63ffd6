"""What the operator decides about the server: its address, its keys, and the bounds of every request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cospec.options import Options
from cospec.runtime.supervisor import MAX_RESTARTS, TIMEOUT
from cospec.sampling_params import MAX_LOGPROBS


def _several(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else (given,) if isinstance(given, str) else given


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_several)]


class ServerSettings(Options):
    """The server's own options; times are in seconds.

    Attributes:
        port: 0 takes a free one.
        api_key: the keys that requests may carry; empty for open access.
        api_key_file: a file with more keys, one a line; ``auth.read_keys`` reads the file.
        allowed_hosts: names that the header ``Host`` may have, ``*.`` for subdomains; empty for any.
        allowed_origins: web pages that may read answers (CORS), ``*`` for any; empty for none.
        max_body_bytes: of one request.
        max_prompts: prompts of one call.
        max_outputs: prompts times ``n`` of one call.
        max_stop_sequences: stop strings of one request.
        max_logprobs: alternatives per token that a request may ask for.
        max_priority: requests may choose a priority from minus to plus this number.
        max_concurrent_requests: outputs that run or wait at once; None derives the bound from ``max_num_seqs``.
        max_key_share: the part of these outputs that one key may hold; None for all with one key, else for half.
        requests_per_minute: calls that one key may begin; None for any number.
        request_timeout: the longest time from the start of a call to the end of its answer.
        max_connections: open connections; beyond the limit the longest waiting one closes.
        header_timeout: for the head of a request, from its first byte or the start of the connection.
        body_timeout: for the body of a request.
        keep_alive_timeout: for the next request of a connection.
        write_timeout: for a client to read what fills its connection.
        strict: refuse keys of a request that are not known, instead of naming them in a header.
        drain_timeout: seconds that running requests get after SIGTERM; a second signal ends them at once.
        engine_timeout: seconds without progress after which ``/health`` calls the engine frozen; see ``Supervision``.
        max_engine_restarts: restarts in a row before the server ends; 0 ends the server with its engine.
        log_level: uvicorn's.
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
