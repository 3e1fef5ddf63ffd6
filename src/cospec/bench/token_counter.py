"""Counts tokens with the target's tokenizer, the same way for every system.

Servers count differently: with or without the end token, by chunks, or by other tokenizers. Therefore the whole output
is encoded again in one piece, and each token belongs to the chunk in which its text *begins*. The chunk borders of the
network do not change the count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from cospec.bench.request_record import Prompt, Timing


class TokenCounter:
    """Fills the token counts of timings.

    Args:
        tokenizer: a Hugging Face fast tokenizer. None spreads the system's reported count over the chunks by length.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @property
    def method(self) -> str:
        """How tokens are counted, for reports."""
        return "as reported by each system" if self._tokenizer is None else "re-encoded by the target's tokenizer"

    def count(self, prompts: Sequence[Prompt], timings: Sequence[Timing]) -> list[Timing]:
        """Return the timings in order, with the token counts of prompts and chunks."""
        return [self._one(prompt, timing) for prompt, timing in zip(prompts, timings, strict=True)]

    def _one(self, prompt: Prompt, timing: Timing) -> Timing:
        texts = [chunk.text for chunk in timing.chunks]
        if self._tokenizer is None:
            counts = spread(timing.reported_tokens or 0, [len(text) for text in texts])
            prompt_tokens = timing.prompt_tokens
        else:
            counts = self._split(texts)
            prompt_tokens = len(self._tokenizer(prompt.text, verbose=False).input_ids)
        chunks = tuple(replace(chunk, tokens=n) for chunk, n in zip(timing.chunks, counts, strict=True))
        return replace(timing, chunks=chunks, prompt_tokens=prompt_tokens)

    def _split(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of the joined text that begin in each piece."""
        assert self._tokenizer is not None
        whole = "".join(texts)
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return pieces([start for start, _ in encoded["offset_mapping"]], [len(text) for text in texts])


def pieces(starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Count the ``starts``, character offsets, in each of adjacent pieces of ``lengths`` characters."""
    ends = list(accumulate(lengths))
    counts = [0] * len(lengths)
    for start in starts:
        # Offsets may omit the white space of a token, and so be at the very end of the text.
        counts[min(bisect_right(ends, start), len(ends) - 1)] += 1
    return counts


def spread(total: int, lengths: Sequence[int]) -> list[int]:
    """Spread ``total`` tokens over pieces in proportion to ``lengths``; the counts sum to ``total`` exactly."""
    if not lengths:
        return []
    whole = sum(lengths)
    if whole == 0:
        return [0] * (len(lengths) - 1) + [total]
    marks = [round(total * end / whole) for end in accumulate(lengths)]
    return [mark - before for before, mark in zip([0, *marks], marks, strict=False)]
