"""Escapes special tokens in the text of messages, which are then plain text.

A chat template writes special tokens, so its result is tokenized with special tokens. A message must not end or begin a
turn. Therefore special tokens in a message are hidden from the template's tokenization and encoded as text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_END = "\ue001"  # end of a mark, from Unicode's private use area, like the start


@dataclass(frozen=True, slots=True)
class Rendered:
    """A piece of a rendered conversation; ``literal`` pieces are encoded without special tokens."""

    text: str
    literal: bool


@dataclass(slots=True)
class SpecialTokenGuard:
    """Hides the special tokens of one conversation. ``hide`` fills ``found``.

    Args:
        texts: the special tokens as text.
    """

    texts: Iterable[str]
    found: list[str] = field(default_factory=list, init=False)
    # Random, so that no message can contain a mark.
    _start: str = field(default_factory=lambda: f"\ue000{secrets.token_hex(8)}:", init=False)

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with a mark instead of each special token in their content."""
        longest_first = sorted(filter(None, self.texts), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(self._mark, value)
            if isinstance(value, list):  # the parts of a content
                return [{**part, "text": hidden(part["text"])} if "text" in part else part for part in value]
            return value

        return [
            {key: hidden(value) if key == "content" else value for key, value in message.items()}
            for message in messages
        ]

    def split(self, text: str) -> list[Rendered]:
        """Return the pieces of a rendered conversation in order, with the hidden texts restored."""
        parts = re.split(re.escape(self._start) + r"(\d+)" + _END, text)
        pieces = [Rendered(self.found[int(part)] if at % 2 else part, bool(at % 2)) for at, part in enumerate(parts)]
        return [piece for piece in pieces if piece.text]

    def _mark(self, match: re.Match[str]) -> str:
        self.found.append(match[0])
        return f"{self._start}{len(self.found) - 1}{_END}"
