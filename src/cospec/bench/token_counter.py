"""Counts tokens once, by the target's tokenizer, the same for every system.

Servers count differently: with or without the end token, by their own chunks, or by a tokenizer of their own. So the
whole output is encoded again here, in one piece, and each token belongs to the chunk in which its text *begins*. Where
the network cut the output never changes the count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from cospec.bench.timing import Prompt, Timing


class TokenCounter:
    """Fills the token counts of timings.

    Args:
        tokenizer: a Hugging Face fast tokenizer; None where there is none, and then what the system itself reports is
            spread over the chunks by their lengths.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @property
    def method(self) -> str:
        """How tokens are counted, for reports."""
        return "as reported by each system" if self._tokenizer is None else "re-encoded by the target's tokenizer"

    def count(self, prompts: Sequence[Prompt], timings: Sequence[Timing]) -> list[Timing]:
        """The timings, in order, with the tokens of prompts and chunks filled in."""
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
        """How many tokens of the joined text begin in each piece."""
        assert self._tokenizer is not None
        whole = "".join(texts)
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return pieces([start for start, _ in encoded["offset_mapping"]], [len(text) for text in texts])


def pieces(starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """How many of ``starts``, character offsets, lie in each of adjacent pieces of ``lengths`` characters."""
    ends = list(accumulate(lengths))
    counts = [0] * len(lengths)
    for start in starts:
        # Offsets may leave out the white space of a token, and so stand at the very end of the text.
        counts[min(bisect_right(ends, start), len(ends) - 1)] += 1
    return counts


def spread(total: int, lengths: Sequence[int]) -> list[int]:
    """``total`` tokens over pieces in proportion to ``lengths``; the counts add up to ``total`` exactly."""
    if not lengths:
        return []
    whole = sum(lengths)
    if whole == 0:
        return [0] * (len(lengths) - 1) + [total]
    marks = [round(total * end / whole) for end in accumulate(lengths)]
    return [mark - before for before, mark in zip([0, *marks], marks, strict=False)]
