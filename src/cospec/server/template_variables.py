"""Turns the fields of a chat into variables of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cospec.errors import InvalidInput
from cospec.server.schemas import Message, Templated
from cospec.text.tokenizer import Names

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})  # transformers fills each key from the others


def variables(body: Templated) -> dict[str, Any]:
    """Return the template's variables. As in vLLM, fields override ``chat_template_kwargs``.

    ``reasoning_effort`` also sets ``enable_thinking``, which many templates read, unless the request sets the variable.

    Raises:
        InvalidInput: ``chat_template_kwargs`` names a variable that a request may not set.
    """
    given = body.chat_template_kwargs or {}
    for name in given:
        if name in RESERVED:
            allowed = "left out, because the server sets the variable"
            raise InvalidInput(f"chat_template_kwargs.{name}", given[name], allowed)
    implied = {} if body.reasoning_effort is None else {"enable_thinking": body.reasoning_effort != "none"}
    return implied | given | _direct(body)


def unread(body: Templated, messages: Sequence[Message], names: Names) -> list[str]:
    """Return the fields that a template ignores, given the ``names`` that the template reads."""
    direct, given = _direct(body), body.chat_template_kwargs or {}
    found = [name for name in direct if name not in names.variables]
    if "enable_thinking" in names.variables - given.keys() and "reasoning_effort" in found:
        found.remove("reasoning_effort")
    found += [f"chat_template_kwargs.{name}" for name in given if name in direct or name not in names.variables]
    sent = {key for message in messages for key in message.plain()} - {"role", "content"}
    read = names.keys | (REASONING if names.keys & REASONING else frozenset())
    return found + [f"messages.{key}" for key in sorted(sent - read)]


def _direct(body: Templated) -> dict[str, Any]:
    values = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity, "documents": body.documents}
    return {name: value for name, value in values.items() if value is not None}
