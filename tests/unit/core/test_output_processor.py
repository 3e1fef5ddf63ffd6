"""The end of an output: everything is cut at the same token, and text comes only when it is certain."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cospec.core.output_processor import OutputProcessor
from cospec.core.stats import TokenLogprobs
from cospec.core.types import (
    TARGET,
    Draft,
    DraftBudget,
    Event,
    FinishReason,
    Request,
    RequestState,
    ScheduledRequest,
    StepOutput,
    VerifyResult,
)
from cospec.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, in byte order, then a few words and an end mark."""
    alphabet = byte_alphabet()
    words = ["the", "Ġcat", "Ġsat", "END", "ab"]
    vocab = {character: number for number, character in enumerate([*alphabet, *words])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


THE, CAT, SAT, END, AB, EOS = 256, 257, 258, 259, 260, 261


def letters(text: str) -> list[int]:
    return list(text.encode())


def commit(
    tokenizer: Tokenizer | None, params: SamplingParams, pieces: list[list[int]], prompt: tuple[int, ...] = (THE,)
) -> tuple[RequestState, list[Event]]:
    """Each piece is one round: all but its last token are an accepted draft, with two more nodes than were kept."""
    made = OutputProcessor(tokenizer, TARGET, frozenset({EOS}))
    sequence = RequestState(Request("s", prompt, params, 0, parent="p"), list(prompt))
    events = []
    for piece in pieces:
        base, kept = len(sequence.tokens), len(piece) - 1
        drafted = (*piece[:-1], 1, 2)
        draft = Draft("s", base, drafted, tuple(range(-1, kept + 1)), ("d",) * (kept + 2)) if kept else None
        result = VerifyResult(tuple(range(kept)), piece[-1], bonus=False)
        rows = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in piece)
        entry = ScheduledRequest(sequence, base - sequence.computed, DraftBudget(kept + 2, kept + 2))
        commits, given = made.commit([StepOutput(entry, draft, result, rows)])
        (done,) = commits
        assert done.computed == sequence.computed < len(sequence.tokens)
        assert len(done.path) <= len(done.tokens)
        assert sequence.computed == base + min(kept, len(done.tokens) - 1)
        assert given[0].tokens == done.tokens == tuple(sequence.tokens[base:])
        assert len(given[0].sources) == len(given[0].logprobs) == len(done.tokens)
        events += given
        if done.finish is not None:
            break
    assert len(sequence.logprobs) == sequence.output_len
    return sequence, events


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events)


def test_a_stop_token_inside_an_accepted_path() -> None:
    params = SamplingParams(max_tokens=50, stop_token_ids=(9, EOS))
    sequence, events = commit(None, params, [[5, 6, 9, 7, 8]])
    assert sequence.tokens[1:] == [5, 6, 9]
    assert (events[0].finish, events[0].stop_reason) == (FinishReason.STOP, 9)
    assert events[0].sources == ("d", "d", "d")
    assert events[0].stats is not None
    assert events[0].stats.accepted == 3
    assert events[0].stats.accepted_by_drafter == events[0].stats.tokens_by_source == {"d": 3}


def test_the_end_of_sequence_is_no_reason_of_the_users() -> None:
    sequence, events = commit(None, SamplingParams(max_tokens=50, stop_token_ids=(EOS,)), [[5, EOS, 6]])
    assert sequence.tokens[1:] == [5, EOS]
    assert (events[0].finish, events[0].stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_the_length_limit_inside_an_accepted_path(limit: int) -> None:
    sequence, events = commit(None, SamplingParams(max_tokens=limit), [[5, 6, 7, 8]])
    assert sequence.tokens[1:] == [5, 6, 7, 8][:limit]
    assert events[0].finish is FinishReason.LENGTH
    assert events[0].sources == ("d", "d", "d", "target")[:limit]
    assert events[0].stats is not None
    assert (events[0].stats.accepted, events[0].stats.rejections) == (min(limit, 3), limit == 4)


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    _, events = commit(None, SamplingParams(max_tokens=2, stop_token_ids=(6,)), [[5, 6, 7]])
    assert events[0].finish is FinishReason.STOP


def test_stop_tokens_below_the_minimum_do_not_stop() -> None:
    """The distribution allowed an accepted stop token, so only the count decides."""
    sequence, events = commit(
        None, SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(6,)), [[6, 6], [7, 6, 5]]
    )
    assert sequence.tokens[1:] == [6, 6, 7, 6]
    assert events[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_inside_an_accepted_path(tokenizer: Tokenizer, keep: bool) -> None:
    params = SamplingParams(max_tokens=50, stop=("cat s",), include_stop_str_in_output=keep)
    sequence, events = commit(tokenizer, params, [[THE], [CAT, SAT, THE, THE]])
    assert sequence.tokens[1:] == [THE, CAT, SAT]
    assert text_of(events) == ("the cat s" if keep else "the ")
    assert (events[-1].finish, events[-1].stop_reason) == (FinishReason.STOP, "cat s")


def test_a_stop_string_over_many_tokens_is_never_shown(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=50, stop=("STOP",))
    pieces = [[token] for token in letters("xSTSTOP!")]
    _, events = commit(tokenizer, params, pieces)
    assert text_of(events) == "xST"
    shown = [event.text for event in events]
    assert shown[:5] == ["x", "", "", "ST", ""]
    assert all("O" not in text for text in shown)


def test_held_back_text_comes_when_it_cannot_be_a_stop_string(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=4, stop=("STOP",))
    _, events = commit(tokenizer, params, [[token] for token in letters("STOn")])
    assert [event.text for event in events] == ["", "", "", "STOn"]
    _, events = commit(tokenizer, SamplingParams(max_tokens=3, stop=("STOP",)), [[token] for token in letters("STO")])
    assert text_of(events) == "STO"
    assert events[-1].finish is FinishReason.LENGTH


def test_the_earliest_then_the_longest_stop_string_wins(tokenizer: Tokenizer) -> None:
    _, events = commit(tokenizer, SamplingParams(max_tokens=9, stop=("b", "ab", "abX")), [[AB, THE]])
    assert (text_of(events), events[-1].stop_reason) == ("", "ab")


def test_stop_strings_below_the_minimum_do_not_stop_later_either(tokenizer: Tokenizer) -> None:
    """A stop string that passed while it was banned is text like any other, also together with a longer stop string."""
    params = SamplingParams(max_tokens=9, min_tokens=3, stop=("ab", "something long"))
    sequence, events = commit(tokenizer, params, [[AB], *([token] for token in letters("xyzab"))])
    assert text_of(events) == "abxyz"
    assert sequence.tokens[1:] == [AB, *letters("xyzab")]


@pytest.mark.parametrize("cut", range(1, 9))
def test_characters_come_whole(tokenizer: Tokenizer, cut: int) -> None:
    text = "aé€🙂b"
    tokens = letters(text)
    pieces = [tokens[start : start + cut] for start in range(0, len(tokens), cut)]
    _, events = commit(tokenizer, SamplingParams(max_tokens=len(tokens)), pieces)
    assert text_of(events) == text
    assert all("\ufffd" not in event.text for event in events)


@pytest.mark.parametrize("start", range(1, 4))
def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer, start: int) -> None:
    """The output completes it; nothing of the prompt comes again and nothing raises."""
    whole = letters("ab🙂")
    _prompt, rest = tuple(whole[: 2 + start]), whole[2 + start :]
    _, events = commit(tokenizer, SamplingParams(max_tokens=20), [[token] for token in [*rest, *letters("yes")]])
    assert text_of(events).endswith("yes")
    assert "ab" not in text_of(events)


def test_any_bytes_at_all(tokenizer: Tokenizer) -> None:
    """Random bytes after random bytes: no error, no text of the prompt, no text lost after whole characters."""
    import random

    random.seed(5)
    for _ in range(300):
        prompt = tuple(
            random.choice([65, 66, 0xC3, 0xA9, 0xE2, 0x82, 0xF0, 0x9F, 0x99, THE]) for _ in range(random.randint(1, 12))
        )
        output = [random.choice([0xC3, 0xA9, 0xE2, 0x82, 0xF0, 0x9F, 0x99, 0x82, 120, EOS]) for _ in range(12)]
        output += letters("~end")
        _, events = commit(tokenizer, SamplingParams(max_tokens=99), [[token] for token in output], prompt)
        text = text_of(events)
        assert text.endswith("~end"), (prompt, output)
        assert text.count("x") == output.count(120)
        assert "A" not in text
        assert "t" not in text


def test_special_tokens_are_left_out_or_kept(tokenizer: Tokenizer) -> None:
    for skip, wanted in ((True, "the cat"), (False, "the<eos> cat")):
        _, events = commit(tokenizer, SamplingParams(max_tokens=3, skip_special_tokens=skip), [[THE], [EOS], [CAT]])
        assert text_of(events) == wanted


def test_an_error_ends_one_sequence() -> None:
    made = OutputProcessor(None, TARGET)
    sequence = RequestState(Request("s", (1, 2), SamplingParams(), 0), [1, 2])
    commits, events = made.commit(
        [StepOutput(ScheduledRequest(sequence, 2, DraftBudget()), None, None, error="it broke")]
    )
    assert (commits[0].finish, commits[0].tokens, sequence.tokens) == (FinishReason.ERROR, (), [1, 2])
    assert (events[0].finish, events[0].error, events[0].tokens) == (FinishReason.ERROR, "it broke", ())
    assert events[0].stats is not None


def test_a_round_that_only_computes_says_nothing() -> None:
    made = OutputProcessor(None, TARGET)
    sequence = RequestState(Request("s", (1, 2, 3, 4), SamplingParams(), 0), [1, 2, 3, 4])
    commits, events = made.commit([StepOutput(ScheduledRequest(sequence, 3, DraftBudget()), None, None)])
    assert events == []
    assert (commits[0].tokens, commits[0].computed, sequence.computed) == ((), 3, 3)
