"""Bans tokens that would repeat an n-gram of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from cospec.core.plugin_base import LogitsProcessor
from cospec.logits_processors.bitmask import Bitmask, ban
from cospec.plugin_options import Options
from cospec.sampling_params import SamplingParams


class NgramOptions(Options):
    """``size``: tokens of an n-gram."""

    size: int = Field(default=3, ge=1, le=32)


@dataclass(frozen=True)
class Seen:
    """The end of the text, ``size - 1`` tokens, and the tokens that followed each such part of the text."""

    end: tuple[int, ...]
    followers: Mapping[tuple[int, ...], frozenset[int]]


class NoRepeatNgram(LogitsProcessor):
    """No n-gram of ``size`` tokens occurs twice in prompt and output."""

    name: ClassVar[str] = "no-repeat-ngram"  # the name of the entry point
    masks: ClassVar[bool] = True
    Options: ClassVar[type[NgramOptions]] = NgramOptions

    def __init__(self, size: int) -> None:
        self._size = size

    @classmethod
    def build(cls, options: NgramOptions, sampling: SamplingParams) -> NoRepeatNgram:
        """Read the size."""
        return cls(options.size)

    def start(self, prompt: Sequence[int]) -> Seen:
        """Read the prompt."""
        state = Seen((), {})
        for token in prompt:
            state = self.advance(state, token)
        return state

    def advance(self, state: Seen, token: int) -> Seen:
        """Return a new state; branches of a draft tree share the given state."""
        before, end = self._size - 1, (*state.end, token)
        if len(state.end) < before:
            return Seen(end, state.followers)
        followed = state.followers.get(state.end, frozenset()) | {token}
        return Seen(end[1:], {**state.followers, state.end: followed})

    def mask(self, state: Seen, vocab_size: int) -> Bitmask | None:
        """Ban the tokens that followed the end of the text before."""
        banned = state.followers.get(state.end, frozenset()) if len(state.end) == self._size - 1 else frozenset()
        return ban(banned, vocab_size) if 0 < len(banned) < vocab_size else None
