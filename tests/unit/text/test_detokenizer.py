"""The incremental detokenizer equals a plain search in the whole text, and examines each character about once."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from cospec.sampling_params import SamplingParams
from cospec.text.detokenizer import IncrementalDetokenizer

PIECES = ("a", "b", "ab", "aab", "bba", "c")


def tokenizer_of(pieces: tuple[str, ...]) -> Tokenizer:
    made = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, pieces[0]))
    made.decoder = decoders.Fuse()
    return made


class Plain:
    """The text of one output, searched as a whole."""

    def __init__(self, params: SamplingParams) -> None:
        self.params, self.text, self.released = params, "", 0

    def push(self, token: int, may_stop: bool) -> str | None:
        old = len(self.text)
        self.text += PIECES[token]
        ends = [
            (at, -len(stop), stop)
            for stop in self.params.stop
            for at in range(len(self.text) - len(stop) + 1)
            if at + len(stop) > old and at >= 0 and self.text[at : at + len(stop)] == stop
        ]
        if not ends or not may_stop:
            return None
        at, _, stop = min(ends)
        self.text = self.text[: at + len(stop) if self.params.include_stop_str_in_output else at]
        return stop

    def release(self, ended: bool) -> str:
        longest = max(map(len, self.params.stop), default=0)
        sizes = [
            size
            for size in range(1, min(longest, len(self.text) + 1))
            if any(stop.startswith(self.text[-size:]) for stop in self.params.stop)
        ]
        end = len(self.text) - (0 if ended else max(sizes, default=0))
        start, self.released = self.released, end
        return self.text[start:end]


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=7), max_size=4).map(tuple),
    keep=st.booleans(),
    min_tokens=st.integers(0, 12),
    steps=st.lists(st.lists(st.integers(0, len(PIECES) - 1), max_size=9), max_size=12),
    streams=st.booleans(),
)
def test_events_have_the_text_of_a_plain_search(
    stops: tuple[str, ...], keep: bool, min_tokens: int, steps: list[list[int]], streams: bool
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep)
    own, plain, count = IncrementalDetokenizer(tokenizer_of(PIECES), params, ()), Plain(params), 0
    for step in steps:
        for token in step:
            count += 1
            found = own.push(token, count >= min_tokens)
            assert found == plain.push(token, count >= min_tokens)
            if found is not None:
                assert own.release(ended=True) == plain.release(ended=True)
                return
        if streams:
            assert own.release(ended=False) == plain.release(ended=False)
    assert own.release(ended=True) == plain.release(ended=True)


@given(steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, len(PIECES) - 1), max_size=40)), max_size=6))
def test_an_output_without_stop_strings_has_all_text_in_order(steps: list[tuple[bool, list[int]]]) -> None:
    """Tokens come one by one where a stop token is among them, otherwise together."""
    own = IncrementalDetokenizer(tokenizer_of(PIECES), SamplingParams(), ())
    for together, step in steps:
        if together:
            own.take(step)
        else:
            for token in step:
                own.push(token)
    assert own.release(ended=True) == "".join(PIECES[token] for _, step in steps for token in step)


class Stop(str):
    """A stop string that counts comparisons with an end of the text."""

    __slots__ = ()
    compared: ClassVar[int] = 0

    def startswith(self, *given: Any) -> bool:
        Stop.compared += 1
        return super().startswith(*given)


@pytest.mark.parametrize("pieces", [("x", "y"), ("a", "x"), ("a" * 40, "ax")])
def test_each_character_begins_one_comparison_with_each_stop_string(pieces: tuple[str, ...]) -> None:
    stops = tuple(Stop("a" * (200 + n) + "b") for n in range(16))
    own = IncrementalDetokenizer(tokenizer_of(pieces), SamplingParams(stop=stops), ())
    tokens = [0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1] * 20
    Stop.compared = 0
    for token in tokens:
        own.push(token)
        own.release(ended=False)
    characters = sum(len(pieces[token]) for token in tokens)
    assert Stop.compared <= len(stops) * (characters + len(tokens))
