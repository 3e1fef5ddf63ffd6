"""Processors that exclude tokens: ``min_tokens``, ``allowed_token_ids`` and ``bad_words_token_ids``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import ClassVar

from cospec.core.plugin_base import LogitsProcessor
from cospec.logits_processors.bitmask import Bitmask, ban
from cospec.logits_processors.edits import FieldOptions
from cospec.sampling_params import SamplingParams


@lru_cache(maxsize=256)
def _banned(tokens: frozenset[int], vocab_size: int) -> Bitmask:
    """Return ``ban`` from a cache, because a request bans the same tokens in many steps."""
    mask = ban(tokens, vocab_size)
    mask.setflags(write=False)
    return mask


class MinTokens(LogitsProcessor):
    """Bans stop tokens below ``min_tokens``. The state is the length of the output."""

    name: ClassVar[str] = "min_tokens"
    masks: ClassVar[bool] = True
    Options: ClassVar[type[FieldOptions]] = FieldOptions

    def __init__(self, min_tokens: int, stops: Collection[int]) -> None:
        self._min_tokens, self._stops = min_tokens, frozenset(stops)

    @classmethod
    def build(cls, options: FieldOptions, sampling: SamplingParams) -> MinTokens:
        """Read the bound and the stop tokens of the request."""
        return cls(sampling.min_tokens, sampling.stop_token_ids)

    def start(self, prompt: Sequence[int]) -> int:
        """Return the length of an empty output."""
        return 0

    def advance(self, state: int, token: int) -> int:
        """Count one more token."""
        return state + 1

    def mask(self, state: int, vocab_size: int) -> Bitmask | None:
        """Ban the stop tokens of a short output."""
        return _banned(self._stops, vocab_size) if state < self._min_tokens and self._stops else None


class AllowedTokens(LogitsProcessor):
    """Allows the tokens of ``allowed_token_ids`` alone."""

    name: ClassVar[str] = "allowed_token_ids"
    masks: ClassVar[bool] = True
    Options: ClassVar[type[FieldOptions]] = FieldOptions

    def __init__(self, tokens: Collection[int]) -> None:
        self._tokens = frozenset(tokens)

    @classmethod
    def build(cls, options: FieldOptions, sampling: SamplingParams) -> AllowedTokens:
        """Read the list of the request."""
        return cls(sampling.allowed_token_ids or ())

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state: the list depends on no token."""

    def advance(self, state: None, token: int) -> None:
        """Return no state."""

    def mask(self, state: None, vocab_size: int) -> Bitmask | None:
        """Allow the tokens of the list."""
        return ~_banned(self._tokens, vocab_size)


class BadWords(LogitsProcessor):
    """Bans the last token of each sequence after the sequence's other tokens. Only the output counts.

    The state is the end of the output, as long as the longest sequence without its last token.
    """

    name: ClassVar[str] = "bad_words_token_ids"
    masks: ClassVar[bool] = True
    Options: ClassVar[type[FieldOptions]] = FieldOptions

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        last_tokens: dict[tuple[int, ...], set[int]] = {}
        for sequence in sequences:
            last_tokens.setdefault(sequence[:-1], set()).add(sequence[-1])
        self._last_tokens = {before: frozenset(tokens) for before, tokens in last_tokens.items()}
        self._lengths = sorted({len(before) for before in last_tokens})
        self._longest = self._lengths[-1] if self._lengths else 0

    @classmethod
    def build(cls, options: FieldOptions, sampling: SamplingParams) -> BadWords:
        """Read the sequences of the request."""
        return cls(sampling.bad_words_token_ids)

    def start(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the end of an empty output."""
        return ()

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        """Append the token, and drop tokens that are too far back."""
        return (*state, token)[-self._longest :] if self._longest else ()

    def mask(self, state: tuple[int, ...], vocab_size: int) -> Bitmask | None:
        """Ban the tokens that would complete a sequence."""
        ends = [state[len(state) - length :] for length in self._lengths if length <= len(state)]
        found = [self._last_tokens[end] for end in ends if end in self._last_tokens]
        if not found:
            return None
        # A set keeps its hash, so most masks come from the cache without a loop over the set.
        return _banned(found[0] if len(found) == 1 else found[0].union(*found[1:]), vocab_size)
