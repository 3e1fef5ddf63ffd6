"""Tokens to text as they come: whole characters only, stop strings found, what may be part of one held back."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cospec.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what an unfinished or broken character is decoded to
UNFINISHED_TOKENS = 3
TOGETHER = 32  # tokens that wait for each other at most
PRIMING_TOKENS = 8  # of the prompt, so that a tokenizer that marks word starts knows whether a space comes first


class IncrementalDetokenizer:
    """The text of one output.

    Args:
        tokenizer: None for models without text; then the text stays empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._tokenizer, self.params = tokenizer, params
        self._stream = _primed(tokenizer, list(prompt[-PRIMING_TOKENS:]), params.skip_special_tokens)
        self.stops = params.stop
        self._longest = max(map(len, params.stop), default=0)
        self._released = 0
        self.pending: list[int] = []  # tokens that are not decoded yet
        self.text = ""

    def take(self, tokens: Sequence[int]) -> None:
        """Add tokens of an output without stop strings; they are decoded when somebody wants the text."""
        self.pending += tokens
        if len(self.pending) >= TOGETHER:
            self._decode()

    def _decode(self) -> None:
        pending, self.pending = self.pending, []
        if self._tokenizer is not None:
            step, tokenizer = self._stream.step, self._tokenizer
            self.text += "".join([step(tokenizer, token) or "" for token in pending])

    def push(self, token: int, may_stop: bool = True) -> str | None:
        """Add one token; returns the stop string that it completed, with the text cut there."""
        if self.pending:
            self._decode()
        piece = self._stream.step(self._tokenizer, token) if self._tokenizer else None
        if not piece:
            return None
        old = len(self.text)
        self.text += piece
        if not self._longest or not may_stop:
            return None
        # Only what ends in the new piece counts: a stop string that passed below ``min_tokens`` is text by now.
        places = ((self.text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self.params.stop)
        found = [(at, stop) for at, stop in places if at >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
        self.text = self.text[: at + len(stop) if self.params.include_stop_str_in_output else at]
        return stop

    def release(self, ended: bool) -> str:
        """The text that became certain since the last call."""
        if self.pending:
            self._decode()
        end = len(self.text)
        if not ended and self._longest:
            end -= self._held_back()
        delta = self.text[self._released : end]
        self._released = max(self._released, end)
        return delta

    def resume(self, committed: Sequence[int], min_tokens: int) -> None:
        """Add output that an earlier stream delivered; its certain text counts as released."""
        for count, token in enumerate(committed, start=1):
            self.push(token, may_stop=count >= min_tokens)
        self.release(ended=False)

    def _held_back(self) -> int:
        """Length of the longest tail that a stop string begins with."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) for stop in self.params.stop):
                return size
        return 0


def _primed(tokenizer: Tokenizer | None, tail: list[int], skip_special: bool) -> DecodeStream:
    """A stream that has seen the end of the prompt.

    The stream takes what it is primed with for text that was not shown yet unless that ends with a whole character, so
    the bytes of an unfinished one, three at most, are fed to it as steps; the output then begins with that character.
    """
    if tokenizer is None:
        return DecodeStream([], skip_special)
    for whole in range(len(tail), max(-1, len(tail) - UNFINISHED_TOKENS - 1), -1):
        if not tokenizer.decode(tail[:whole], skip_special).endswith(REPLACEMENT):
            stream = DecodeStream(tail[:whole], skip_special)
            for token in tail[whole:]:
                stream.step(tokenizer, token)
            return stream
    return DecodeStream([], skip_special)  # bytes that are no text at all
