"""A request's body: read up to a limit, and parsed as JSON, in a thread if the body is long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from cospec.errors import InvalidInput, words
from cospec.server import limits
from cospec.server.errors import BodyTooLarge
from cospec.server.settings import ServerSettings

ResultT = TypeVar("ResultT")
SHORT = 16 * 2**10  # bytes that are parsed faster than a thread starts


async def read_bytes(http: HttpRequest, limit: int) -> bytes:
    """Read the whole body.

    Raises:
        BodyTooLarge: the header ``Content-Length`` or the received data exceeds the limit.
    """
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > len(str(limit)) or int(declared) > limit):
        raise BodyTooLarge(limit)
    data = bytearray()
    async for part in http.stream():
        data += part
        if len(data) > limit:
            raise BodyTooLarge(limit)
    return bytes(data)


async def off_loop(size: int, work: Callable[[], ResultT]) -> ResultT:
    """Return the result of ``work``, computed in a thread unless the work is about few bytes."""
    return work() if size <= SHORT else await asyncio.to_thread(work)


def parse(data: bytes, settings: ServerSettings) -> dict[str, Any]:
    """Parse the JSON object of a body, within the bounds of ``limits``.

    Raises:
        InvalidInput: the body is no JSON object, or a list is too long.
    """
    limits.check_structure(data)
    try:
        given = json.loads(data.decode("utf-8-sig"))  # as text: in bytes the parser accepts other encodings
    except RecursionError:
        raise InvalidInput("body", words("nested too deeply"), "a JSON object") from None
    except ValueError as error:
        raise InvalidInput("body", words(f"not JSON ({error})"), "a JSON object") from None
    if not isinstance(given, dict):
        raise InvalidInput("body", given, "a JSON object")
    limits.check_lists(given, settings)
    return given
