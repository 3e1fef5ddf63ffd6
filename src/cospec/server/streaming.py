"""The HTTP answers of calls: one JSON object, or a stream of server-sent events (SSE)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from fastapi.responses import Response, StreamingResponse
from starlette.requests import Request as HttpRequest

from cospec.core.types import Event
from cospec.errors import CospecError
from cospec.server import bodies, errors, responses
from cospec.server.errors import EngineFailure
from cospec.server.responses import ResponseForm
from cospec.server.service import Call, Output, Service

DONE = b"data: [DONE]\n\n"
LISTED_BYTES = 32  # of one token id or log-probability in JSON, about
Indexed = AsyncGenerator[tuple[int, Event], None]


async def respond(http: HttpRequest, service: Service, call: Call, shape: ResponseForm) -> Response:
    """Run ``call`` and answer; stream if the body asks for a stream.

    Raises:
        CospecError: the engine refuses the call, or fails before the answer has begun.
    """
    events = service.events(http, call)
    if not call.body.stream:
        outputs = await _gather(events, call)
        size = LISTED_BYTES * sum([responses.count_listed(call.body, output, output) for output in outputs])
        whole = await bodies.off_loop(size, lambda: _encode(responses.whole(call, shape, outputs)))
        return Response(whole, media_type="application/json", headers={"X-Request-Id": call.id})
    # Wait for the first event before the status line, so that a refused call gets an error status.
    try:
        first = await anext(events, None)
        if first is None:  # the client disconnected before the first token
            return Response(status_code=errors.CLIENT_GONE)
        _raise_failure(first[1])
    except BaseException:
        await _close(events)
        raise
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": call.id}
    return StreamingResponse(_stream(first, events, call, shape), media_type="text/event-stream", headers=headers)


async def _gather(events: Indexed, call: Call) -> list[Output]:
    outputs = _outputs(call)
    try:
        async for index, event in events:
            _raise_failure(event)
            outputs[index].take(event)
    finally:
        await _close(events)
    return outputs


async def _stream(first: tuple[int, Event], events: Indexed, call: Call, shape: ResponseForm) -> AsyncIterator[bytes]:
    outputs = _outputs(call)
    try:
        for piece in await _pieces(first, outputs, call, shape):
            yield piece
        async for item in events:
            for piece in await _pieces(item, outputs, call, shape):
                yield piece
        if call.body.usage_wanted:
            yield _sse(responses.chunk(call, shape, []) | {"usage": responses.usage(call, outputs)})
    except CospecError as error:  # the status line is sent, so the stream reports the error
        yield _sse(errors.of(error))
    finally:
        await _close(events)
    yield DONE


async def _pieces(item: tuple[int, Event], outputs: list[Output], call: Call, shape: ResponseForm) -> list[bytes]:
    index, event = item
    _raise_failure(event)
    size = LISTED_BYTES * responses.count_listed(call.body, event, outputs[index])
    return await bodies.off_loop(size, lambda: _chunks(index, event, outputs, call, shape))


def _chunks(index: int, event: Event, outputs: list[Output], call: Call, shape: ResponseForm) -> list[bytes]:
    output = outputs[index]
    choices = shape.chunks(index, output, event)
    output.count(event)
    found: list[bytes] = []
    for choice in choices:
        chunk = responses.chunk(call, shape, [choice])
        if choice["finish_reason"] is not None:
            chunk["distribution"], chunk["exact"] = output.distribution, output.exact
            chunk["divergence"] = responses.divergence([output])
        if call.body.usage_always:
            chunk["usage"] = responses.usage(call, outputs)
        found.append(_sse(chunk))
    return found


def _outputs(call: Call) -> list[Output]:
    return [Output(prompt, request) for prompt, request in zip(call.prompts, call.requests, strict=True)]


def _raise_failure(event: Event) -> None:
    if event.error is not None:
        raise EngineFailure(event.error)


async def _close(events: Indexed) -> None:
    """Run the generator's clean-up now: open requests are aborted in the engine."""
    with contextlib.suppress(RuntimeError):  # another task runs the generator and cleans up
        await events.aclose()


def _encode(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
