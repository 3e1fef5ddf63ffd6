"""One streaming request to an OpenAI-compatible server, and the server's health, model and metrics.

Supports cospec, vLLM, llama.cpp and TGI. Proxies of the environment are ignored, because proxies buffer streams.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from cospec.bench.counters import LoadSample, from_prometheus
from cospec.bench.request_record import Chunk, Params, Prompt, Timing
from cospec.errors import InvalidInput, words

CONNECT_SECONDS = 10.0
UNREACHABLE = "no connection"  # the error kind of an unreachable server


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The target of requests, and the common fields of requests.

    Attributes:
        url: of the server, with or without ``/v1``.
        model: the server's model name; None lets ``probe`` ask the server.
        chat: use ``/v1/chat/completions`` instead of ``/v1/completions``.
        extra_body: keys added to every request's body.
        timeout: seconds without data until a request fails.
    """

    url: str
    model: str | None = None
    chat: bool = False
    api_key: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    @property
    def root(self) -> str:
        """The URL without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: Prompt, params: Params) -> dict[str, Any]:
        """Return the JSON of one request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            fields["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            fields["prompt"] = prompt.text
        if params.ignore_eos:
            fields["ignore_eos"] = True
        if params.seed is not None:
            fields["seed"] = params.seed
        return fields | dict(self.extra_body)

    def connect(self) -> httpx.AsyncClient:
        """Return a client for many parallel requests."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.AsyncClient(
            base_url=self.root,
            headers=headers,
            timeout=httpx.Timeout(self.timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )


class StreamClock:
    """Seconds since the creation of the object."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start


async def probe(http: httpx.AsyncClient, endpoint: Endpoint) -> Endpoint:
    """Check that the server answers; fill ``model``, and request counters per request from cospec servers.

    Raises:
        InvalidInput: no server answers at the URL, or the server names no model.
    """
    try:
        if (httpx.URL(endpoint.url).port or 0) > 65535:
            raise httpx.InvalidURL("the port is invalid")
        answer = await http.get("/v1/models")
        answer.raise_for_status()
        models = [str(one["id"]) for one in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unusable(endpoint, str(error) or type(error).__name__) from None
    except (ValueError, KeyError, TypeError):
        raise _unusable(endpoint, "/v1/models is no list of models") from None
    if not models and endpoint.model is None:
        raise _unusable(endpoint, "the server names no model")
    extra = dict(endpoint.extra_body)
    if "cospec:" in (await _metrics_page(http) or ""):
        extra.setdefault("include_speculation_stats", True)
    return replace(endpoint, model=endpoint.model or models[0], extra_body=extra)


def _unusable(endpoint: Endpoint, why: str) -> InvalidInput:
    return InvalidInput(
        "url", words(f"{endpoint.url} ({why})"), "the address of an OpenAI-compatible server that answers"
    )


async def read_load(http: httpx.AsyncClient, at: float) -> LoadSample | None:
    """Read the server's ``/metrics``; None without such a page, or without known names."""
    page = await _metrics_page(http)
    return None if page is None else from_prometheus(page, at)


async def _metrics_page(http: httpx.AsyncClient) -> str | None:
    try:
        answer = await http.get("/metrics", follow_redirects=True)
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == httpx.codes.OK else None


@dataclass(slots=True)
class _Stream:
    """The data of one answer so far. Only ``complete`` changes the fields."""

    chunks: list[Chunk] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    finish: str | None = None
    done: bool = False

    def take(self, event: Mapping[str, Any], at: float) -> None:
        """Add one server-sent event that arrived ``at`` seconds.

        Raises:
            _Failed: the event reports an error.
        """
        if event.get("error"):
            raise _Failed("error in the stream", str(event["error"]))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if text:
                self.chunks.append(Chunk(at, text))
            self.finish = choice.get("finish_reason") or self.finish


class _Failed(Exception):
    """A failed request: the kind of the error, and its description."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


async def complete(
    http: httpx.AsyncClient,
    endpoint: Endpoint,
    prompt: Prompt,
    params: Params,
    clock: StreamClock,
    arrival: float = 0.0,
) -> Timing:
    """Send one prompt and record its stream. The timing holds any error and the data before the error."""
    stream, failed = _Stream(), None
    sent = clock()
    try:
        async with http.stream("POST", endpoint.path, json=endpoint.body(prompt, params)) as answer:
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread()).decode(errors="replace")
                raise _Failed(f"HTTP {answer.status_code}", text[:500])
            async for event in _events(answer):
                if event is None:
                    stream.done = True
                    break
                stream.take(event, clock())
        if not stream.done and stream.finish is None:
            raise _Failed("cut off", "the stream ended before the answer did")
    except _Failed as error:
        failed = error
    except httpx.TimeoutException as error:
        failed = _Failed("timeout", str(error) or type(error).__name__)
    except httpx.ConnectError as error:
        failed = _Failed(UNREACHABLE, str(error) or type(error).__name__)
    except httpx.HTTPError as error:
        failed = _Failed("connection lost", str(error) or type(error).__name__)
    return Timing(
        id=prompt.id,
        arrival=arrival,
        sent=sent,
        end=clock(),
        chunks=tuple(stream.chunks),
        category=prompt.category,
        prompt_tokens=stream.usage.get("prompt_tokens") or 0,
        reported_tokens=stream.usage.get("completion_tokens"),
        stats=stream.usage.get("speculation") or {},
        finish_reason=stream.finish,
        error=None if failed is None else str(failed),
        error_kind=None if failed is None else failed.kind,
    )


async def _events(answer: httpx.Response) -> AsyncIterator[Mapping[str, Any] | None]:
    """Yield server-sent events as objects, None at the end of the stream."""
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue  # keep-alive comments and blank lines
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            yield None
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise _Failed("bad stream", f"no JSON in {data[:200]!r}") from None
        if not isinstance(event, dict):
            raise _Failed("bad stream", f"no object in {data[:200]!r}")
        yield event
