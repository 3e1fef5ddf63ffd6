"""Bounds on what one request may ask for, checked before any text is tokenized. Pure.

A body passes three checks: ``check_structure`` on its bytes, before the JSON parser makes an object for each value;
``check_lists`` on the parsed JSON, before a schema looks at each element; ``outputs`` on the typed body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cospec.errors import InvalidInput, words
from cospec.server.settings import ServerSettings

MAX_STRUCTURE = 20_000  # objects, lists and keys of a body: the parser is as fast for them as for plain text
MAX_STOP_CHARACTERS = 256
MAX_TOKEN_IDS = 1024  # of ``stop_token_ids`` and ``logit_bias``
# A string that does not end goes on to the end of the body: each byte is looked at once.
_OUTSIDE_STRINGS = re.compile(rb'[\[{:]|"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)


def check_structure(data: bytes) -> None:
    """Refuse a body of too many objects, lists and keys.

    Raises:
        InvalidInput: with the bound.
    """
    if sum(data.count(sign) for sign in (b"[", b"{", b":")) <= MAX_STRUCTURE:
        return
    found = 0
    for match in _OUTSIDE_STRINGS.finditer(data):  # texts hold such signs, too
        found += data[match.start()] != ord('"')
        if found > MAX_STRUCTURE:
            allowed = f"a JSON object with at most {MAX_STRUCTURE} objects, lists and keys"
            raise InvalidInput("body", words("too large a structure"), allowed)


def check_lists(given: Mapping[str, Any], settings: ServerSettings) -> None:
    """Refuse lists that are too long.

    Args:
        given: a body as parsed from JSON; no type is checked yet.

    Raises:
        InvalidInput: the first list, with its bound.
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
    for name in ("stop_token_ids", "logit_bias"):
        _check_length(name, given.get(name), MAX_TOKEN_IDS, "token ids")


def _check_length(name: str, given: object, limit: int, kind: str) -> None:
    if isinstance(given, list | dict) and len(given) > limit:
        raise InvalidInput(name, words(f"a list of {len(given)}"), f"at most {limit} {kind}")


def outputs(prompts: int, n: int | None, settings: ServerSettings) -> int:
    """How many outputs a call asks for.

    Raises:
        InvalidInput: the call asks for too many.
    """
    found = prompts * max(n or 1, 1)
    if found > settings.max_outputs:
        allowed = f"at most {settings.max_outputs} outputs for all prompts together"
        raise InvalidInput("n", words(f"giving {found} outputs"), allowed)
    return found


def check_choices(values: Mapping[str, int | None], settings: ServerSettings) -> None:
    """Refuse numbers that the operator bounds.

    Args:
        values: ``priority`` and the numbers of alternatives per token, by the field's name.

    Raises:
        InvalidInput: the first number outside its bound.
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
        return "absent or 0, as this server lets no request choose (see --max-priority)"
    return f"a whole number from {low} to {high}"
