"""A request's body: read up to a limit, checked against bounds, and parsed as JSON; in a thread if the body is long.

A body passes three checks before any text is tokenized; all are pure. ``check_structure`` reads the bytes, before the
JSON parser creates objects. ``check_lists`` reads the parsed JSON, before a schema checks each element. ``outputs``
reads the typed body.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from cospec.errors import InvalidInput, words
from cospec.server.admission import ticket
from cospec.server.errors import BodyTooLarge
from cospec.server.settings import ServerSettings

ResultT = TypeVar("ResultT")
SHORT = 16 * 2**10  # bytes that are parsed faster than a thread starts
MAX_STRUCTURE = 20_000  # objects, lists and keys of a body; the parser handles so many as fast as plain text
MAX_STOP_CHARACTERS = 256
MAX_TOKEN_IDS = 1024  # of each field with token ids, the prompt apart
MAX_BAD_WORD_TOKENS = 64  # of each sequence of ``bad_words_token_ids``
MAX_PROCESSORS = 16
# An unterminated string extends to the end of the body, so each byte is read once.
_OUTSIDE_STRINGS = re.compile(rb'[\[{:]|"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)


async def read_bytes(http: HttpRequest, limit: int) -> bytes:
    """Read the whole body. Its bytes count until the answer ends.

    Raises:
        BodyTooLarge: the header ``Content-Length`` or the received data exceeds the limit.
        Overloaded: the bodies of all requests have too many bytes now.
    """
    held = ticket(http)
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > len(str(limit)) or int(declared) > limit):
        raise BodyTooLarge(limit)
    data = bytearray()
    async for part in http.stream():
        if len(data) + len(part) > limit:
            raise BodyTooLarge(limit)
        held.take_bytes(len(part))
        data += part
    return bytes(data)


async def off_loop(size: int, work: Callable[[], ResultT]) -> ResultT:
    """Return the result of ``work``, computed in a thread unless the work is about few bytes."""
    return work() if size <= SHORT else await asyncio.to_thread(work)


def parse(data: bytes, settings: ServerSettings) -> dict[str, Any]:
    """Parse the JSON object of a body, within the bounds of this module.

    Raises:
        InvalidInput: the body is no JSON object, or a list is too long.
    """
    check_structure(data)
    try:
        given = json.loads(data.decode("utf-8-sig"))  # as text: in bytes the parser accepts other encodings
    except RecursionError:
        raise InvalidInput("body", words("nested too deeply"), "a JSON object") from None
    except ValueError as error:
        raise InvalidInput("body", words(f"not JSON ({error})"), "a JSON object") from None
    if not isinstance(given, dict):
        raise InvalidInput("body", given, "a JSON object")
    check_lists(given, settings)
    return given


def check_structure(data: bytes) -> None:
    """Refuse a body with too many objects, lists and keys.

    Raises:
        InvalidInput: the body exceeds the bound.
    """
    if sum(data.count(sign) for sign in (b"[", b"{", b":")) <= MAX_STRUCTURE:
        return
    found = 0
    for match in _OUTSIDE_STRINGS.finditer(data):  # strings may hold such characters, too
        found += data[match.start()] != ord('"')
        if found > MAX_STRUCTURE:
            allowed = f"a JSON object with at most {MAX_STRUCTURE} objects, lists and keys"
            raise InvalidInput("body", words("too large a structure"), allowed)


def check_lists(given: Mapping[str, Any], settings: ServerSettings) -> None:
    """Refuse lists that are too long.

    Args:
        given: a body as parsed from JSON, without type checks.

    Raises:
        InvalidInput: a list is too long; the error names the first such list and its bound.
    """
    prompt = given.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        _check_length("prompt", prompt, settings.max_prompts, "prompts")
    stop = given.get("stop")
    _check_length("stop", stop, settings.max_stop_sequences, "stop strings")
    for text in stop if isinstance(stop, list) else [stop]:
        if isinstance(text, str) and len(text) > MAX_STOP_CHARACTERS:
            allowed = f"at most {MAX_STOP_CHARACTERS} characters for each stop string"
            raise InvalidInput("stop", words(f"a text of {len(text)} characters"), allowed)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        _check_length(name, given.get(name), MAX_TOKEN_IDS, "token ids")
    sequences = given.get("bad_words_token_ids")
    _check_length("bad_words_token_ids", sequences, MAX_TOKEN_IDS, "sequences")
    for sequence in sequences if isinstance(sequences, list) else ():
        _check_length("bad_words_token_ids", sequence, MAX_BAD_WORD_TOKENS, "token ids in a sequence")
    _check_length("logits_processors", given.get("logits_processors"), MAX_PROCESSORS, "names")


def _check_length(name: str, given: object, limit: int, kind: str) -> None:
    if isinstance(given, list | dict) and len(given) > limit:
        raise InvalidInput(name, words(f"a list of {len(given)}"), f"at most {limit} {kind}")


def outputs(prompts: int, n: int | None, settings: ServerSettings) -> int:
    """Return the number of outputs of a call.

    Raises:
        InvalidInput: the call asks for too many outputs.
    """
    found = prompts * max(n or 1, 1)
    if found > settings.max_outputs:
        given = words(f"{n or 1} for each of {prompts} prompts, {found} outputs")
        raise InvalidInput("n", given, f"at most {settings.max_outputs} outputs of all prompts together")
    return found


def check_choices(values: Mapping[str, int | None], settings: ServerSettings) -> None:
    """Refuse numbers beyond the operator's bounds.

    Args:
        values: ``priority`` and the numbers of alternatives per token, by field name.

    Raises:
        InvalidInput: a number is out of bounds.
    """
    for name, value in values.items():
        if name == "priority":
            low, high = -settings.max_priority, settings.max_priority
        else:
            low, high = 0, settings.max_logprobs
        if value is not None and not low <= value <= high:
            raise InvalidInput(name, value, _range(name, low, high))


def _range(name: str, low: int, high: int) -> str:
    if name == "priority" and high == 0:
        return "absent or 0, as this server forbids priorities (see --max-priority)"
    return f"a whole number from {low} to {high}"
