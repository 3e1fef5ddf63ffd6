"""Reads prompts of Python programs: texts, token ids of any integer type, vLLM's dictionaries, messages."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cospec.errors import InvalidInput
from cospec.text.tokenizer import TextTokenizer

PROMPT = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
MESSAGE = "an object with a role (system, developer, user or assistant) and a content of text"
ROLES = ("system", "developer", "user", "assistant")

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


def each(prompts: Any) -> list[Any]:
    """Split the argument into single prompts: one prompt, or any iterable of prompts.

    Raises:
        InvalidInput: the argument is no prompt and no iterable.
    """
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidInput("prompts", prompts, f"{PROMPT}, or a list of prompts")
    found = list(prompts)
    return [found] if found and _id(found[0]) is not None else found


def read(prompt: Any, tokens: TextTokenizer) -> list[int]:
    """Return the token ids of one prompt; ids pass through.

    Raises:
        InvalidInput: the argument is no prompt.
    """
    given = prompt
    if isinstance(prompt, Mapping):
        given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
    if isinstance(given, str):
        return list(tokens.encode(given))
    ids = [_id(each) for each in given] if isinstance(given, Iterable) and not isinstance(given, bytes) else [None]
    found = [id for id in ids if id is not None]
    if len(found) < len(ids):
        raise InvalidInput("prompt", prompt, PROMPT)
    return found


def text(prompt: Any) -> str | None:
    """Return the text of a prompt; None for a prompt of token ids."""
    given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return given if isinstance(given, str) else None


def conversations(messages: Any) -> list[list[dict[str, str]]]:
    """Return one conversation or several in the form of chat templates.

    Raises:
        InvalidInput: a message is invalid; a role or a content is missing or has another type.
    """
    given = list(messages) if isinstance(messages, Sequence) and not isinstance(messages, str | bytes) else []
    several = given if given and not isinstance(given[0], Mapping) else [given]
    if not all(isinstance(each, Sequence) and not isinstance(each, str | bytes) and each for each in several):
        raise InvalidInput("messages", messages, "a list of messages, or a list of such lists")
    return [[_message(message) for message in each] for each in several]


def _message(message: Any) -> dict[str, str]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise InvalidInput("message", message, MESSAGE)
    # ``developer`` is OpenAI's newer word for ``system``.
    return {"role": "system" if role == "developer" else role, "content": _content(message)}


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) and not isinstance(content, bytes) else [None]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(piece, str) for piece in texts):
        raise InvalidInput("message", message, MESSAGE)
    return "".join(map(str, texts))


def _id(value: Any) -> int | None:
    """Return a token id of any integer type; None for other values."""
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
