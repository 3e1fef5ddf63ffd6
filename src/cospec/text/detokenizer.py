"""Incremental detokenization: releases whole characters, finds stop strings, holds back a possible stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cospec.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # the decoding of an incomplete or invalid character
UNFINISHED_TOKENS = 3
TOGETHER = 32  # the most tokens that are decoded together
PRIMING_TOKENS = 8  # of the prompt; a tokenizer that marks word starts then knows whether a space comes first


class IncrementalDetokenizer:
    """The text of one output.

    Args:
        tokenizer: None for models without text; the text then stays empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._tokenizer, self.params = tokenizer, params
        self._stream = _primed(tokenizer, list(prompt[-PRIMING_TOKENS:]), params.skip_special_tokens)
        self.stops = params.stop
        self._longest = max(map(len, params.stop), default=0)
        self.pending: list[int] = []  # tokens that are not decoded yet
        self._final: list[str] = []  # text since the last release that no stop string can cut
        self._tail = ""  # the text after the final text; empty without stop strings

    def take(self, tokens: Sequence[int]) -> None:
        """Add tokens of an output without stop strings; ``release`` decodes the tokens."""
        self.pending += tokens
        if len(self.pending) >= TOGETHER:
            self._decode()

    def _decode(self) -> None:
        pending, self.pending = self.pending, []
        if self._tokenizer is not None:
            step, tokenizer = self._stream.step, self._tokenizer
            self._final.append("".join([step(tokenizer, token) or "" for token in pending]))

    def push(self, token: int, may_stop: bool = True) -> str | None:
        """Add one token; return the stop string that the token completed, and cut the text there."""
        if self.pending:
            self._decode()
        piece = self._stream.step(self._tokenizer, token) if self._tokenizer else None
        if not piece:
            return None
        if not self._longest:
            self._final.append(piece)
            return None
        old = len(self._tail)
        self._tail += piece
        # Search only matches that end in the new piece: below ``min_tokens`` a completed stop string became text.
        places = ((self._tail.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self.params.stop)
        found = [(at, stop) for at, stop in places if at >= 0] if may_stop else []
        if found:
            at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._tail = self._tail[: at + len(stop) if self.params.include_stop_str_in_output else at]
            return stop
        if len(self._tail) > 2 * self._longest:  # a longer tail would be copied for each token
            self._finish(len(self._tail) - self._longest)
        return None

    def release(self, ended: bool) -> str:
        """Return the text that became final since the last call."""
        if self.pending:
            self._decode()
        if self._longest:
            self._finish(len(self._tail) - (0 if ended else self._stop_prefix_length()))
        delta = "".join(self._final)
        self._final.clear()
        return delta

    def resume(self, committed: Sequence[int], min_tokens: int) -> None:
        """Add output that an earlier stream delivered; its final text counts as released."""
        for count, token in enumerate(committed, start=1):
            self.push(token, may_stop=count >= min_tokens)
        self.release(ended=False)

    def _finish(self, end: int) -> None:
        """Make the text before ``end`` of the tail final."""
        self._final.append(self._tail[:end])
        self._tail = self._tail[end:]

    def _stop_prefix_length(self) -> int:
        """Return the length of the longest end of the text that begins a stop string.

        The end is part of the tail: the earlier text had no longer end than the text that was held back. Thus all calls
        for an output examine about one end per character of the output.
        """
        for size in range(min(self._longest - 1, len(self._tail)), 0, -1):
            end = self._tail[-size:]
            if any(stop.startswith(end) for stop in self.params.stop):
                return size
        return 0


def _primed(tokenizer: Tokenizer | None, tail: list[int], skip_special: bool) -> DecodeStream:
    """Return a stream that has consumed the end of the prompt.

    ``DecodeStream`` treats its initial tokens as shown only if they end with a whole character. So the bytes of an
    incomplete character, three at most, are added as steps. The output then begins with that character.
    """
    if tokenizer is None:
        return DecodeStream([], skip_special)
    for whole in range(len(tail), max(-1, len(tail) - UNFINISHED_TOKENS - 1), -1):
        if not tokenizer.decode(tail[:whole], skip_special).endswith(REPLACEMENT):
            stream = DecodeStream(tail[:whole], skip_special)
            for token in tail[whole:]:
                stream.step(tokenizer, token)
            return stream
    return DecodeStream([], skip_special)  # no valid text
