"""Tokens to text as they come: whole characters only, stop strings found, what may be part of one held back."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cospec.params import SamplingParams

PRIMING_TOKENS = 8  # of the prompt, so that a tokenizer that marks word starts knows whether a space comes first


class TextStream:
    """The text of one output.

    Args:
        tokenizer: None for models without text; then the text stays empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: Seq[int]) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._stream = DecodeStream(list(prompt[-PRIMING_TOKENS:]), params.skip_special_tokens)
        self._longest = max(map(len, params.stop), default=0)
        self._released = 0
        self.text = ""

    def push(self, token: int, may_stop: bool = True) -> str | None:
        """Add one token; returns the stop string that it completed, with the text cut there."""
        piece = self._stream.step(self._tokenizer, token) if self._tokenizer else None
        if not piece:
            return None
        start = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        if not self._longest or not may_stop:
            return None
        found = [(at, stop) for stop in self._params.stop if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
        self.text = self.text[: at + len(stop) if self._params.include_stop_str_in_output else at]
        return stop

    def release(self, ended: bool) -> str:
        """The text that became certain since the last call."""
        end = len(self.text)
        if not ended and self._longest:
            end -= self._held_back()
        delta = self.text[self._released : end]
        self._released = max(self._released, end)
        return delta

    def _held_back(self) -> int:
        """Length of the longest tail that a stop string begins with."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) for stop in self._params.stop):
                return size
        return 0
